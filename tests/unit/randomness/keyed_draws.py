"""Helpers of the tests of keyed randomness: draws at given positions, and statistical checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpipe_fast.randomness.random import KeyedRandomMode, make_key

keyed = torch.ops.gpipe_fast
KEY = make_key(-0x123456789ABCDEF, microbatch=3, first_layer=2)
N = 1 << 17
DRAWS: dict[str, tuple[Any, ...]] = {
    "bernoulli": (0.9,),
    "uniform": (-1.0, 3.0),
    "normal": (1.0, 2.0),
    "exponential": (0.5,),
    "integer": (-5, 20),
}


def draw(
    name: str,
    size: list[int],
    *parameters: Any,
    key: Tensor = KEY,
    layer: int = 1,
    ordinal: int = 0,
    dtype: Any = None,
) -> Tensor:
    dtype = dtype or (torch.int64 if name == "integer" else torch.float32)
    op = getattr(keyed, f"keyed_{name}")
    parameters = parameters or DRAWS[name]
    return op(key, layer, ordinal, size, *parameters, dtype=dtype, device=torch.device("cpu"))


def keyed_mode(layer: int = 0, microbatch: int = 0, minibatch: int = 7) -> KeyedRandomMode:
    mode = KeyedRandomMode(make_key(minibatch, microbatch))
    mode.enter_layer(layer)
    return mode


def assert_uncorrelated(a: Tensor, b: Tensor) -> None:
    a, b = a.flatten().double(), b.flatten().double()
    correlation = torch.corrcoef(torch.stack([a, b]))[0, 1].item()
    assert abs(correlation) < 4 / math.sqrt(a.numel())


def assert_distributed(drawn: Tensor, cdf: Callable[[Tensor], Tensor]) -> None:
    """Kolmogorov-Smirnov test at level 1e-4: bounds the largest distance of the distribution functions."""
    ordered = drawn.flatten().double().sort().values
    steps = torch.arange(ordered.numel() + 1, dtype=torch.float64) / ordered.numel()
    expected = cdf(ordered)
    distance = torch.max((expected - steps[:-1]).abs().max(), (steps[1:] - expected).abs().max())
    assert distance.item() < 2.23 / math.sqrt(ordered.numel())
