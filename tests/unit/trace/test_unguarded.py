"""What guards miss: patched classes, functions with new code, and the environment."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast.trace.dynamo import capture
from gpipe_fast.trace.unguarded import unguarded_state

X = torch.ones(2, 3)
VARIABLE = "GPIPE_FAST_TEST_FACTOR"


class Scaled(nn.Module):
    """A layer whose method may be patched."""

    def scale(self, x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x)


class ReadsEnvironment(nn.Module):
    """A layer that reads an environment variable."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(os.getenv(VARIABLE, "1"))


def state_of(layer: nn.Module) -> Callable[[], bool]:
    return unguarded_state(capture(layer, (X,), {}).guards)


def test_new_code_and_new_defaults_of_a_method_are_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    is_unchanged = state_of(Scaled())

    def other(self: Scaled, x: Tensor, by: float = 2.0) -> Tensor:
        return x - by

    with monkeypatch.context() as patch:
        patch.setattr(Scaled.scale, "__code__", other.__code__)
        assert not is_unchanged()
    assert is_unchanged()
    monkeypatch.setattr(Scaled.scale, "__defaults__", (3.0,))
    assert not is_unchanged()


def test_the_environment_matters_to_those_who_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2")
    reads, other = state_of(ReadsEnvironment()), state_of(Scaled())
    assert reads()
    monkeypatch.setenv(VARIABLE, str(int("2")))  # the same value in another object
    assert reads()
    monkeypatch.setenv(VARIABLE, "3")
    assert not reads()
    assert other()
