"""Python's garbage collector is paused while layers are traced."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.lower.program_template import lower_graphs
from gpipe_fast.runtime import compiled
from gpipe_fast.trace.garbage import collector_paused
from gpipe_fast.trace.joint_graph import JointGraph
from gpipe_fast.trace.trace import trace

pytestmark = pytest.mark.usefixtures("one_thread")


class MakesGarbage(nn.Module):
    """Makes so many objects that the collector, were it enabled, would run seven times."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5000):
            cycle: list[object] = []
            cycle.append(cycle)
        return x * 2


def test_callbacks_of_the_collector_are_not_taken_for_the_layer() -> None:
    times: list[float] = []

    def read_clock(phase: str, info: dict[str, int]) -> None:
        times.append(time.time())

    gc.callbacks.append(read_clock)
    try:
        found = trace([MakesGarbage()], [torch.ones(2)])
    finally:
        gc.callbacks.remove(read_clock)
    assert isinstance(found, JointGraph), found
    # Each collection calls back twice. One follows the trace, and others may run before and after the pause.
    assert len(times) < 2 * 5000 // gc.get_threshold()[0]


def test_no_layer_is_lowered_while_the_collector_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection while a stage is lowered takes as long as lowering it."""
    was_enabled = []

    def lower(*arguments: Any) -> Any:
        was_enabled.append(gc.isenabled())
        return lower_graphs(*arguments)

    monkeypatch.setattr(compiled, "lower_graphs", lower)
    GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu"])(torch.ones(4, 2))
    assert was_enabled == [False]


class Cycle:
    def __init__(self) -> None:
        self.own = self


def test_garbage_of_the_block_is_collected_after_it() -> None:
    with collector_paused():
        assert not gc.isenabled()
        garbage = weakref.ref(Cycle())
        assert garbage() is not None
    assert gc.isenabled()
    assert garbage() is None


def test_a_collector_that_was_disabled_stays_disabled() -> None:
    gc.disable()
    try:
        with collector_paused():
            garbage = weakref.ref(Cycle())
        assert not gc.isenabled()
        assert garbage() is not None
    finally:
        gc.enable()
