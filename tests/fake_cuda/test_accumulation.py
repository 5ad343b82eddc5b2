"""Gradient accumulation on the fake CUDA runtime: the number of kernels, and the bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.fake_cuda import accumulation_cases
from tests.fake_cuda.build import can_build
from tests.fake_cuda.process import run
from tests.fake_cuda.race_detector import check, read

pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "functions", [accumulation_cases.PROGRAMS, accumulation_cases.BITS], ids=["programs", "bits"]
)
def test_gradients_accumulate_as_specified(
    functions: Sequence[Callable[[], None]], libraries: tuple[Path, Path], tmp_path: Path
) -> None:
    """Runs the functions of accumulation_cases.py, and checks the log for races."""
    names, log = [function.__name__ for function in functions], tmp_path / "log"
    assert run("accumulation_cases.py", libraries, *names, log=log, late=1) == names
    assert check(read(log), may_wait=True) == []
