"""Inference on many mini-batches: `GPipe.stream` compared with a call for each.

{NUMBER} mini-batches of {BATCH} samples, K = 2 stages on the CPU with one thread each, eval mode. Candidates
take turns in {ROUNDS} rounds; medians. 'First result' is the time from the call of `stream`, or of the model,
to the first result: the median of {FIRST_RESULTS}.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from bench.measure import Ratio, report, samples, timing
from gpipe_fast import GPipe

NUMBER, ROUNDS, FIRST_RESULTS = 200, 3, 15
BATCH = 32
DEPTHS = (1, 2, 4, 8)
CALLS = "calls"


class Sleep(nn.Module):
    """Sleeps 0.5 ms per sample, as a device that computes without the host's cores would."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(5e-4 * len(x))
        return x + 1


def linears(width: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(each for _ in range(count) for each in (nn.Linear(width, width), nn.ReLU())))


@dataclass(frozen=True)
class Case:
    """A model in two stages of equal time.

    Attributes:
        name: its name.
        make: makes its layers.
        balance: layers of each stage.
        width: the features of a sample.
        backend: as for `GPipe`.
    """

    name: str
    make: Callable[[], nn.Sequential]
    balance: Sequence[int]
    width: int
    backend: str = "aten"

    def pipe(self, chunks: int) -> GPipe:
        torch.manual_seed(0)
        devices = ["cpu"] * len(self.balance)
        pipe = GPipe(self.make(), self.balance, devices=devices, chunks=chunks, backend=self.backend)
        pipe.threads_per_stage = 1
        return pipe.eval()


CASES = (
    Case("sleeping layers, 16 ms per stage", lambda: nn.Sequential(Sleep(), Sleep()), [1, 1], 4, "eager"),
    Case("20 linear layers of width 512 per stage", lambda: linears(512, 40), [40, 40], 512),
)


def called(pipe: GPipe, batches: Sequence[Tensor]) -> list[Tensor]:
    """Returns the results of a call for each mini-batch."""
    with torch.no_grad():
        return [pipe(x) for x in batches]


def first_result(pipe: GPipe, batches: Sequence[Tensor], depth: int | None) -> float:
    """Returns the milliseconds until the first result; ``depth`` None: of a call."""
    begin = time.perf_counter()
    results = pipe.stream(batches, depth=depth) if depth else iter(called(pipe, batches[:1]))
    next(results)
    return (time.perf_counter() - begin) * 1e3


def streaming(pipe: GPipe, batches: Sequence[Tensor], depth: int) -> Callable[[], object]:
    return lambda: sum(1 for _ in pipe.stream(batches, depth=depth))


def rows_of(case: Case, chunks: int, number: int = NUMBER, rounds: int = ROUNDS) -> list[list[object]]:
    """Measures a model; checks that results equal those of calls."""
    pipe = case.pipe(chunks)
    batches = [torch.randn(BATCH, case.width) for _ in range(number)]
    expected = called(pipe, batches)
    candidates: dict[str, Callable[[], object]] = {CALLS: lambda: called(pipe, batches)}
    depths: dict[str, int | None] = {CALLS: None} | {f"stream, depth={depth}": depth for depth in DEPTHS}
    for name, depth in depths.items():
        if depth is not None:
            if not all(map(torch.equal, pipe.stream(batches, depth=depth), expected)):
                raise AssertionError(f"{case.name}, {name}: results differ from those of calls")
            candidates[name] = streaming(pipe, batches, depth)
    found = samples(candidates, rounds)
    return [
        [
            case.name,
            chunks,
            name,
            f"{number / timing(times).median * 1e6:.1f}",
            str(Ratio.of(found[CALLS], times)),
            f"{median(first_result(pipe, batches, depths[name]) for _ in range(FIRST_RESULTS)):.1f}",
        ]
        for name, times in found.items()
    ]


def main() -> None:
    torch.set_num_threads(1)
    rows = [row for case in CASES for chunks in (1, 2) for row in rows_of(case, chunks)]
    report(
        globals(),
        ["model", "chunks", "candidate", "mini-batches per s", "relative to calls", "first result, ms"],
        rows,
    )
