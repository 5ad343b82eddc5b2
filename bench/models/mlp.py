"""A small MLP: a stage whose run time is only overhead."""

from __future__ import annotations

from torch import nn


def mlp(width: int = 64) -> list[nn.Module]:
    """Returns one stage of the overhead benchmark: 2 x (Linear, ReLU)."""
    return [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
