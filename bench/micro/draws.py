"""Keyed random draws, compared with PyTorch's.

float32 on one thread; both are called through torch.ops with the same options.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from bench.comparison import Comparison, Opened, report_comparisons
from gpipe_fast.randomness.random import make_key

aten, keyed = torch.ops.aten, torch.ops.gpipe_fast
KEY = make_key(0x9E3779B97F4A7C15 - 2**64, 0)
TO = {"dtype": torch.float32, "device": torch.device("cpu")}
SIZES = (1_000, 1 << 22)

# Distribution: PyTorch's op, the keyed op, and the mean and standard deviation that both must have.
DRAWS: dict[str, tuple[Callable[[int], Tensor], Callable[[int], Tensor], float, float]] = {
    "bernoulli": (
        lambda n: aten.bernoulli_.float(aten.empty.memory_format([n], **TO), 0.9),
        lambda n: keyed.keyed_bernoulli.default(KEY, 0, 0, [n], 0.9, **TO),
        0.9,
        0.3,
    ),
    "uniform": (
        lambda n: aten.rand.default([n], **TO),
        lambda n: keyed.keyed_uniform.default(KEY, 0, 0, [n], 0.0, 1.0, **TO),
        0.5,
        12**-0.5,
    ),
    "normal": (
        lambda n: aten.randn.default([n], **TO),
        lambda n: keyed.keyed_normal.default(KEY, 0, 0, [n], 0.0, 1.0, **TO),
        0.0,
        1.0,
    ),
    "exponential": (
        lambda n: aten.exponential_.default(aten.empty.memory_format([n], **TO)),
        lambda n: keyed.keyed_exponential.default(KEY, 0, 0, [n], 1.0, **TO),
        1.0,
        1.0,
    ),
}


def check(name: str, draw: Callable[[int], Tensor], mean: float, std: float) -> None:
    """Asserts that the mean and the standard deviation of a million draws are right."""
    drawn = draw(1 << 20)
    error = abs(drawn.mean().item() - mean) / (std / drawn.numel() ** 0.5)
    assert error < 5, f"{name}: mean {drawn.mean().item()} is {error:.1f} standard errors from {mean}"
    assert abs(drawn.std().item() / std - 1) < 0.01, f"{name}: standard deviation is {drawn.std()}, not {std}"


def _opened(name: str, size: int, stack: ExitStack) -> Opened:
    theirs, ours, mean, std = DRAWS[name]
    for draw in (ours, theirs):
        check(name, draw, mean, std)
    return {"keyed": partial(ours, size), "torch": partial(theirs, size)}, None


COMPARISONS = [
    Comparison(
        f"{name} draws, {size:,} elements",
        ["keyed", "torch"],
        partial(_opened, name, size),
        rounds=9 if size > 1 << 20 else 41,
        calls=max(1, 20_000 // size),
        sampled=name == "normal",
    )
    for name in DRAWS
    for size in SIZES
]


def main() -> None:
    report_comparisons(globals(), in_us=True)
