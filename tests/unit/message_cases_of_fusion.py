"""Mistakes that trigger the errors and warnings of gpipe_fast.fuse."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from unittest import mock

from gpipe_fast.fuse import cubin_cache
from gpipe_fast.fuse.compile_pool import WORKERS_VARIABLE, num_workers
from gpipe_fast.fuse.cubin import Cubin
from gpipe_fast.fuse.kernel_name import KernelName, find
from gpipe_fast.lower.launch import launch_kernel
from gpipe_fast.trace.triton_calls import call_triton_kernel
from tests.unit.message_cases import case


def set_workers(value: str) -> None:
    with mock.patch.dict(os.environ, {WORKERS_VARIABLE: value}):
        num_workers()


def store_where_a_file_is() -> None:
    with tempfile.NamedTemporaryFile() as file:
        folder = str(Path(file.name) / "cubins")
        with mock.patch.dict(os.environ, {cubin_cache.FOLDER_VARIABLE: folder}):
            cubin_cache.store("key", Cubin(b"", "kernel", 4, 1, 0, False, False))


def name(module: str, file: str) -> KernelName:
    return KernelName(module, file, "name", "file 0")


OF_FUSION = [
    case(
        "GPIPE_FAST_COMPILE_WORKERS must be a number of processes, got 'many'",
        "unset it",
        set_workers,
        "many",
    ),
    case("name of no_module cannot be", "must compile it", find, name("no_module", "/no/file.py")),
    case("the node of a launch", "lowered, not called", launch_kernel, None, ()),
    case("the node of a kernel's launch", "replaced, not called", call_triton_kernel, None, (), ()),
    case("/no/file is not a Python file", "must compile it", find, name("no_module", "/no/file")),
    case("name of tests.unit.message_cases_of_fusion has", "must compile it", find, name(__name__, __file__)),
]
WARNINGS_OF_FUSION = [
    case("kernels cannot be kept in", "set GPIPE_FAST_CACHE", store_where_a_file_is),
]
