"""Counts the bytes that stages move, and their launches, with and without fused kernels; needs no GPU.

Counted, not measured: what the lowered programs of one micro-batch read and write, and the calls, launches
and accumulations that they consist of, in every micro-batch of a mini-batch but the first. Bytes leave out
matrix products, convolutions and fused attention; launches include them. An operator counts as one launch,
though it may launch several kernels. Sizes: batch {LARGE.batch}, sequence {LARGE.length}, width
{LARGE.width}, {LARGE.heads} heads, {LARGE.vocab} classes. Precision 'autocast' has fp32 parameters and
inputs, and casts to bf16. The graphs are those of a GPU of compute capability 9.0.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from bench.measure import Table, report
from gpipe_fast.fuse.casts import hoist_parameter_casts
from gpipe_fast.fuse.fuse import fuse
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.split import StageGraph, split
from gpipe_fast.lower.work import Work, count
from tools.stages import LARGE, PRECISIONS, SMALL, STAGES, Precision, Size, Stage, trace_stage

HEADERS = (
    "stage", "precision", "MB without fusion", "MB with fusion", "removed",
    "launches without fusion", "launches with fusion",
)  # fmt: skip


SIZES = {"small": SMALL, "large": LARGE}

Fuse = Callable[[StageGraph], StageGraph]


@dataclass(frozen=True)
class Row:
    """One program of a stage, before and after fusion."""

    stage: str
    precision: str
    program: str
    before: Work
    after: Work


def fused(graph: StageGraph) -> StageGraph:
    """Returns the graph with fused kernels."""
    return fuse(graph).graph


def count_stage(
    stage: Stage, precision: Precision, size: Size, fuse_graph: Fuse
) -> dict[str, tuple[Work, Work]]:
    """Returns the work of a stage's forward and recomputing backward, before and after fusion.

    Fusion includes that casts of parameters are moved out of the graphs.
    """
    joint = trace_stage(stage, precision, size)
    plain, hoisted = (split(graph, FULL_RECOMPUTE) for graph in (joint, hoist_parameter_casts(joint)))
    assert plain.backward is not None
    assert hoisted.backward is not None
    pairs = (plain.forward, hoisted.forward), (plain.backward, hoisted.backward)
    return {before.name: (count(lower(before)), count(lower(fuse_graph(after)))) for before, after in pairs}


def rows(size: Size, names: Iterable[str], fuse_graph: Fuse) -> Iterator[Row]:
    """Counts the named stages in every precision."""
    for name in names:
        for precision, how in PRECISIONS.items():
            for program, (before, after) in count_stage(STAGES[name], how, size, fuse_graph).items():
                yield Row(name, precision, program, before, after)


def count_rows(size: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the fields of the rows of stages, counted in this process."""
    return [asdict(row) for row in rows(SIZES[size], names, fused)]


def run(size: str, names: Sequence[str], runtime: Path) -> list[Row]:
    """Counts stages in a process with the fake CUDA runtime.

    Args:
        size: a key of `SIZES`.
        names: keys of `STAGES`.
        runtime: the library of the fake runtime.
    """
    from tools import fake_cuda

    found = fake_cuda.call(runtime, "tools.fusion:count_rows", size, list(names))
    return [Row(**{**each, **{key: Work(**each[key]) for key in ("before", "after")}}) for each in found]


def cells(row: Row) -> list[object]:
    """Returns a row of the table."""
    before, after = row.before, row.after
    removed = f"{1 - after.moved / before.moved:.0%}"
    megabytes = (f"{work.moved / 1e6:.1f}" for work in (before, after))
    return [row.stage, row.precision, *megabytes, removed, before.launches, after.launches]


def left(work: Work) -> list[list[object]]:
    """Returns megabytes, share of bytes and launches by operator or kernel, largest first."""
    return [
        [name, f"{moved / 1e6:.1f}", f"{moved / work.moved:.1%}", work.launches_of[name]]
        for name, moved in sorted(work.moved_by.items(), key=lambda item: -item[1])
    ]


def tables(rows: Iterable[Row]) -> tuple[list[list[object]], Table]:
    """Returns the rows of the recomputing backward, and a table of the forward."""
    rows = list(rows)
    backward = [cells(row) for row in rows if row.program != "forward"]
    forward = [cells(row) for row in rows if row.program == "forward"]
    return backward, Table("Forward", HEADERS, forward)


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools fusion", description=__doc__)
    parser.add_argument("--left", nargs=2, metavar=("STAGE", "PRECISION"), help="print one stage's operators")
    parser.add_argument("--size", choices=SIZES, default="large")
    options = parser.parse_args(arguments)
    from tools import fake_cuda

    if (libraries := fake_cuda.libraries("fusion")) is None:
        return
    runtime, _ = libraries
    if options.left is not None:
        stage, precision = options.left
        if stage not in STAGES or precision not in PRECISIONS:
            parser.error(f"choose from {', '.join(STAGES)} and {', '.join(PRECISIONS)}")
        for row in run(options.size, [stage], runtime):
            if row.precision == precision:
                headers = ("name", "MB", "share", "launches")
                print(f"{row.program}\n\n{tabulate(left(row.after), headers, tablefmt='github')}\n")
        return
    backward, forward = tables(run(options.size, list(STAGES), runtime))
    report(globals(), HEADERS, backward, [forward])
