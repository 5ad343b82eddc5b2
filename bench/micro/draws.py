"""Benchmarks keyed random ops against PyTorch's.

Both are called through `torch.ops` with the same options, so that they have the same Python overhead.

float32; both called through torch.ops with the same options.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench.measure import alternate, report
from gpipe_fast.randomness.random import make_key

aten, keyed = torch.ops.aten, torch.ops.gpipe_fast
KEY = make_key(0x9E3779B97F4A7C15 - 2**64, 0)
TO = {"dtype": torch.float32, "device": torch.device("cpu")}

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
    drawn = draw(1 << 20)
    error = abs(drawn.mean().item() - mean) / (std / drawn.numel() ** 0.5)
    assert error < 5, f"{name}: mean {drawn.mean().item()} is {error:.1f} standard errors from {mean}"
    assert abs(drawn.std().item() / std - 1) < 0.01, (
        f"{name}: standard deviation is {drawn.std().item()}, expected {std}"
    )


def main() -> None:
    rows = []
    for name, (baseline, ours, mean, std) in DRAWS.items():
        for draw in (baseline, ours):
            check(name, draw, mean, std)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for n in (1_000, 1 << 16, 1 << 22):
                candidates = {"torch": partial(baseline, n), "keyed": partial(ours, n)}
                timings = alternate(candidates, rounds=9 if n > 1 << 20 else 41, calls=max(1, 20_000 // n))
                ratio = timings["torch"].median / timings["keyed"].median
                rows.append([name, threads, n, str(timings["torch"]), str(timings["keyed"]), ratio])
    report(
        globals(),
        ["draw", "threads", "elements", "torch, µs: median [p20, p80]", "keyed, µs", "torch / keyed"],
        rows,
    )
