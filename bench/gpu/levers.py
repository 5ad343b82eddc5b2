"""Each mechanism beside the step without it, on one GPU: what makes a step faster, turned off by turns.

`python -m bench levers [lever ...]` measures the GPT of `python -m bench cuda gpt-8`. Each mechanism
has a switch among the arguments of `GPipe`, and takes turns with its old way in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import measure
from bench.gpu.rows import RowBenchmark
from bench.gpu.subjects import EXCEPT_ATTENTION, ROWS, WARM_UP, Synchronized

ROW, ROUNDS, ROUND_SECONDS, LEVER_SECONDS = "gpt-8", 10, 15.0, 150.0
HEADERS = ["lever", "with: ms, median [p20, p80]", "without: ms", "without / with"]


@dataclass(frozen=True)
class Lever:
    """A mechanism and the way without it.

    Attributes:
        title: what is compared with what.
        off: arguments of `GPipe` without it.
        on: arguments of `GPipe` with it.
    """

    title: str
    off: Mapping[str, Any] = field(default_factory=dict)
    on: Mapping[str, Any] = field(default_factory=dict)


LEVERS = {
    "fuse": Lever("fused kernels, captured", {"fuse": False, "capture": True}, {"capture": True}),
    "fuse-uncaptured": Lever(
        "fused kernels, not captured", {"fuse": False, "capture": False}, {"capture": False}
    ),
    "capture": Lever("CUDA graphs", {"capture": False}, {"capture": True}),
    "where-it-pays": Lever("CUDA graphs only where launches do not hide", {"capture": True}),
    "attention": Lever("attention saved", on={"checkpoint": EXCEPT_ATTENTION}),
}


def times(options: Sequence[Mapping[str, Any]], device: str) -> list[list[float]]:
    """Returns the microseconds of the rounds of our step with each of several arguments of `GPipe`."""
    subject = ROWS[ROW].full if device.startswith("cuda") else ROWS[ROW].small
    data = subject.data(device)
    steps = {
        str(i): Synchronized(subject.ours(device, data, **each), device) for i, each in enumerate(options)
    }
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    return list(measure.samples(steps, ROUNDS, pause=measure.PAUSE, seconds=ROUND_SECONDS).values())


def measured(name: str, device: str) -> list[object]:
    """Returns the row of a lever."""
    lever = LEVERS[name]
    with_it, without = times([lever.on, lever.off], device)
    ratio = str(measure.Ratio.of(without, with_it))
    return [lever.title, measure.timing(with_it).ms(), measure.timing(without).ms(), ratio]


def tables_of(name: str, found: Any) -> list[measure.Table]:
    """Returns the table of one lever, or one that says why it is not measured."""
    if isinstance(found, str):
        return [measure.Table(name, ["result"], [[found]])]
    return [measure.Table(name, HEADERS, [found])]


NOTE = "Forward and backward of our step. Ratios are paired by round, with their 95% confidence interval.\n"
BENCHMARK = RowBenchmark(
    "bench.gpu.levers", "Levers", NOTE, tuple(LEVERS), measured, tables_of, LEVER_SECONDS, "levers"
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:]) else 1)
