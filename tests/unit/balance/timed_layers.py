"""Layers of known cost and the fake clock that they advance; no balance test depends on real time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipe_fast.profile


class Clock:
    """A fake clock. A `TimedLayer` advances it by its cost, and each reading by a microsecond.

    Args:
        slow: factors that multiply the forward times of successive layer runs; 1 once they are used up.
    """

    def __init__(self, *slow: float) -> None:
        self.now = 0.0
        self.slow = list(slow)

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def __deepcopy__(self, memo: object) -> Clock:
        return self  # copies of a layer advance the same clock

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        monkeypatch.setattr(gpipe_fast.profile, "perf_counter", self)
        return self


class _TimedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.clock.now += ctx.seconds
        return gradients[0], None, None


class TimedLayer(nn.Module):
    """Multiplies by a weight, and advances the clock by the given seconds."""

    def __init__(self, clock: Clock, forward: float, backward: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.clock, self.seconds = clock, (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.clock.slow.pop(0) if self.clock.slow else 1.0
        self.clock.now += self.seconds[0] * factor
        result: Tensor = _TimedBackward.apply(x * self.weight, self.clock, self.seconds[1])
        return result


def sequence(clock: Clock, *seconds: float) -> nn.Sequential:
    """Returns layers that take `seconds` in the forward, and twice as long in the backward."""
    return nn.Sequential(*(TimedLayer(clock, each, 2 * each) for each in seconds))
