"""Placement of stages on the fake CUDA runtime's devices, and out-of-memory errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fake_cuda import placement_cases


@pytest.mark.extended
def test_stages_are_placed_on_devices(run: Callable[..., list[str]]) -> None:
    names = [case.__name__ for case in placement_cases.PLACEMENT]
    assert run("placement_cases.py", *names) == names


def test_out_of_memory_raises_and_the_pipeline_stays_usable(run: Callable[..., list[str]]) -> None:
    names = [case.__name__ for case in placement_cases.OUT_OF_MEMORY]
    assert run("placement_cases.py", *names, memory=placement_cases.MEMORY) == names
