"""Every family of kernels in Triton's interpreter, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAMILIES = sorted((Path(__file__).parent / "kernels").glob("test_*.py"))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda path: path.stem.removeprefix("test_"))
def test_kernels_compute_what_pytorch_does(family: Path) -> None:
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(family)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
