"""What guards miss: facts about what a forward has read, and the environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast.trace.dynamo import capture
from gpipe_fast.trace.unguarded import Conditions, Read

X = torch.ones(2, 3)
VARIABLE = "GPIPE_FAST_TEST_FACTOR"


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class ReadsEnvironment(nn.Module):
    """A layer that reads an environment variable."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(os.getenv(VARIABLE, "1"))


def state_of(layer: nn.Module) -> Callable[[], bool]:
    return Conditions(capture(layer, (X,), {}).guards, layer).surroundings_hold


def test_the_environment_matters_to_those_who_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2")
    reads, other = state_of(ReadsEnvironment()), state_of(Scaled())
    assert reads()
    monkeypatch.setenv(VARIABLE, str(int("2")))  # the same value in another object
    assert reads()
    monkeypatch.setenv(VARIABLE, "3")
    assert not reads()
    assert other()


def holds_after(before: Any, after: Any) -> bool:
    """Returns whether the facts about two attributes still hold if they are changed."""
    names = "first", "second"
    reads = [Read(e, compile(e, "read", "eval"), {}, False) for e in (f"L['layer'].{name}" for name in names)]
    layers = [Scaled(), Scaled()]
    for layer, values in zip(layers, (before, after), strict=True):
        vars(layer).update(zip(names, values, strict=True))
    guards = mock.Mock(reads=reads, functions=(), code=(), classes=(), reads_environment=False)
    return Conditions(guards, layers[0]).hold_for({"layer": layers[1]})


ONE, OTHER, AUTO = [1], [1], object()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0.0, -0.0),
        ((1, 2), (1.0, 2)),
        ((1, 2), (True, 2)),
        (frozenset({1}), frozenset({1.0})),
        ({"a", 8, None}, {"a", 9, None}),
        (AUTO, object()),
    ],
)
def test_values_that_guards_take_for_equal_are_told_apart(before: Any, after: Any) -> None:
    assert holds_after((before, 1), (before, 1))
    assert not holds_after((before, 1), (after, 1))


def test_places_that_hold_the_same_object_are_told_from_those_that_do_not() -> None:
    assert holds_after((ONE, ONE), (OTHER, OTHER))
    assert not holds_after((ONE, ONE), (ONE, OTHER))
