"""Mistakes that trigger the errors and warnings of gpipe_fast.fuse."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from unittest import mock

from gpipe_fast.fuse import cubins
from gpipe_fast.lower.launch import launch_kernel
from gpipe_fast.trace.triton_calls import call_triton_kernel
from tests.unit.message_cases import case


def set_workers(value: str) -> None:
    with mock.patch.dict(os.environ, {cubins.WORKERS_VARIABLE: value}):
        cubins.num_workers()


def keep_where_a_file_is() -> None:
    with tempfile.NamedTemporaryFile() as file:
        cubins._writable_folder(str(Path(file.name) / "cubins"))


OF_FUSION = [
    case(
        "GPIPE_FAST_COMPILE_WORKERS must be a number of processes, got 'many'",
        "unset it",
        set_workers,
        "many",
    ),
    case("the node of a launch", "lowered, not called", launch_kernel, None, ()),
    case("the node of a kernel's launch", "replaced, not called", call_triton_kernel, None, (), ()),
]
WARNINGS_OF_FUSION = [
    case("kernels cannot be kept in", "set GPIPE_FAST_CACHE", keep_where_a_file_is),
]
