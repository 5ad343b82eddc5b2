"""Gradient accumulation on the fake CUDA runtime: the number of kernels, and the bits."""

from __future__ import annotations

from collections.abc import Callable

from tests.fake_cuda import accumulation_cases
from tests.fake_cuda.race_detector import Line, check


def test_gradients_accumulate_as_specified(logged: Callable[..., list[Line]]) -> None:
    names = [case.__name__ for case in accumulation_cases.CASES]
    assert check(logged("accumulation_cases.py", *names, expected=names, late=1), may_wait=True) == []
