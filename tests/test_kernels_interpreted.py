"""Every family of kernels in Triton's interpreter, and their references, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

FAMILIES = sorted((Path(__file__).parent / "kernels").glob("test_*.py"))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda path: path.stem.removeprefix("test_"))
def test_kernels_compute_what_pytorch_does(family: Path) -> None:
    run_tests([family], TRITON_INTERPRET="1")


def test_references_compute_what_pytorch_does() -> None:
    """In bf16 too; as on a GPU, the tests are collected without the interpreter."""
    run_tests(FAMILIES, GPIPE_FAST_KERNELS_ON="cpu", TRITON_INTERPRET="0")


def run_tests(families: Sequence[Path], **variables: str) -> None:
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, **variables}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, families)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
