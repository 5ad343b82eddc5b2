"""Keyed draws against PyTorch's own: `python -m bench.random`; run as a file, it hides Python's `random`.

Both are called through `torch.ops` with the same options, so that what Python adds to a call is the same.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from gpipe_fast.random import make_key

aten, keyed = torch.ops.aten, torch.ops.gpipe_fast
KEY = make_key(0x9E3779B97F4A7C15 - 2**64, 0)
TO = {"dtype": torch.float32, "device": torch.device("cpu")}

# name: PyTorch's draw, ours, and the mean and standard deviation that both must show.
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


def microseconds(draw: Callable[[int], Tensor], n: int, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        draw(n)
    return (time.perf_counter() - start) / calls * 1e6


def percentiles(times: list[float]) -> tuple[float, float, float]:
    cuts = statistics.quantiles(times, n=10)
    return statistics.median(times), cuts[1], cuts[7]


def check(name: str, draw: Callable[[int], Tensor], mean: float, std: float) -> None:
    drawn = draw(1 << 20)
    error = abs(drawn.mean().item() - mean) / (std / drawn.numel() ** 0.5)
    assert error < 5, f"{name}: mean {drawn.mean().item()} is {error:.1f} standard errors from {mean}"
    assert abs(drawn.std().item() / std - 1) < 0.01, (
        f"{name}: standard deviation {drawn.std().item()}, not {std}"
    )


def main() -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    print(f"{machine}; float32, median [p20, p80] in µs")
    print(f"{'':12} {'threads':>7} {'elements':>9} {'torch':>27} {'keyed':>27} {'torch/keyed':>11}")
    for name, (baseline, ours, mean, std) in DRAWS.items():
        for draw in (baseline, ours):
            check(name, draw, mean, std)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for n in (1_000, 1 << 16, 1 << 22):
                calls = max(1, 20_000 // n)
                rounds = 9 if n > 1 << 20 else 41
                pairs = [
                    (microseconds(baseline, n, calls), microseconds(ours, n, calls)) for _ in range(rounds)
                ]
                columns = [percentiles(list(times)) for times in zip(*pairs, strict=True)]
                cells = [f"{m:9.1f} [{low:7.1f},{high:8.1f}]" for m, low, high in columns]
                ratio = columns[0][0] / columns[1][0]
                print(
                    f"{name:12} {torch.get_num_threads():7} {n:9} {cells[0]} {cells[1]} {ratio:11.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
