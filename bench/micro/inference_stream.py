"""Inference on many mini-batches: `GPipe.stream` compared with a call for each.

{NUMBER} mini-batches of {BATCH} samples, K = 2 stages on the CPU with one thread each, eval mode. Candidates
take turns in {ROUNDS} rounds; medians. 'First result' is the time from the call of `stream`, or of the model,
to the first result: the median of {FIRST_RESULTS}.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from bench.measure import Ratio, report, samples, timing
from gpipe_fast import GPipe

NUMBER, BATCH, ROUNDS, FIRST_RESULTS = 40, 32, 3, 5
DEPTHS = (1, 2, 4, 8)
CALLS = "calls"


class Sleep(nn.Module):
    """Sleeps 0.5 ms per sample, as a device that computes without the host's cores would."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(5e-4 * len(x))
        return x + 1


def sleeping() -> list[nn.Module]:
    """Sleeping layers, 16 ms per stage."""
    return [Sleep(), Sleep()]


def linear() -> list[nn.Module]:
    """20 linear layers of width 512 per stage."""
    return [each for _ in range(40) for each in (nn.Linear(512, 512), nn.ReLU())]


def results(pipe: GPipe, batches: list[Tensor], depth: int | None) -> Iterator[Tensor]:
    """Yields the results of a stream; ``depth`` None: of a call for each mini-batch."""
    with torch.no_grad():
        yield from pipe.stream(batches, depth=depth) if depth else map(pipe, batches)


def rows_of(make: Callable[[], list[nn.Module]], chunks: int) -> list[list[object]]:
    """Measures a model; checks that results equal those of calls."""
    torch.manual_seed(0)
    layers = make()
    balance = [len(layers) // 2] * 2
    backend = "eager" if make is sleeping else "aten"
    pipe = GPipe(nn.Sequential(*layers), balance, devices=["cpu"] * 2, chunks=chunks, backend=backend)
    pipe.threads_per_stage = 1
    pipe.eval()
    batches = [torch.randn(BATCH, 512) for _ in range(NUMBER)]
    run = partial(results, pipe, batches)
    depths = {CALLS: None, **{f"stream, depth={depth}": depth for depth in DEPTHS}}
    expected = list(run(None))
    for name, depth in depths.items():
        assert all(map(torch.equal, run(depth), expected)), f"{name}: results differ from those of calls"
    found = samples({name: lambda d=depth: list(run(d)) for name, depth in depths.items()}, ROUNDS)  # type: ignore[misc]

    def first_result(depth: int | None) -> float:
        begin = time.perf_counter()
        next(run(depth))
        return (time.perf_counter() - begin) * 1e3

    return [
        [
            str(make.__doc__).rstrip("."),
            chunks,
            name,
            f"{NUMBER / timing(times).median * 1e6:.1f}",
            str(Ratio.of(found[CALLS], times)),
            f"{median(first_result(depths[name]) for _ in range(FIRST_RESULTS)):.1f}",
        ]
        for name, times in found.items()
    ]


def main() -> None:
    torch.set_num_threads(1)
    cases = ((sleeping, 1), (sleeping, 2), (linear, 1))
    report(
        globals(),
        ["model", "chunks", "candidate", "mini-batches per s", "relative to calls", "first result, ms"],
        [row for case in cases for row in rows_of(*case)],
    )
