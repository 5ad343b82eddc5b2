"""Placement of stages on the fake CUDA runtime's devices, and out-of-memory errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fake_cuda import placement_cases
from tests.fake_cuda.race_detector import Line


@pytest.mark.extended
def test_stages_are_placed_on_devices(run: Callable[..., list[str]]) -> None:
    names = [case.__name__ for case in placement_cases.PLACEMENT]
    assert run("placement_cases.py", *names) == names


def test_operators_are_timed_on_their_devices(logged: Callable[..., list[Line]]) -> None:
    name = placement_cases.operators_are_timed_on_their_devices.__name__
    log = logged("placement_cases.py", name, expected=[name], capabilities="90 75 80")
    marks = [line.number for line in log if line.kind == "mark"]
    waits = [line for line in log[slice(*marks)] if line.kind == "synchronize device"]
    assert {line.words[0] for line in waits} == {"0", "1", "2"}


def test_equal_stages_are_traced_once_for_equal_gpus(run: Callable[..., list[str]]) -> None:
    for cases in (placement_cases.OF_STAGES, placement_cases.ALONE):
        names = [case.__name__ for case in cases]
        assert run("placement_cases.py", *names) == names


def test_stages_are_traced_for_their_kind_of_gpu(run: Callable[..., list[str]]) -> None:
    names = [case.__name__ for case in placement_cases.OF_TWO_KINDS]
    assert run("placement_cases.py", *names, capabilities="90 75") == names


def test_out_of_memory_raises_and_the_pipeline_stays_usable(run: Callable[..., list[str]]) -> None:
    names = [case.__name__ for case in placement_cases.OUT_OF_MEMORY]
    assert run("placement_cases.py", *names, memory=placement_cases.MEMORY) == names
