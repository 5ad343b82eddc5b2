"""The process in which `fusion` traces stages and counts their programs, on the fake CUDA runtime.

`python -m tools.fusion_process SIZE` prints one JSON object per stage, precision and program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

from gpipe_fast.fuse.casts import hoist_parameter_casts
from gpipe_fast.fuse.fuse import fuse
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.split import StageGraph, split
from gpipe_fast.lower.work import Work, count
from tools.stages import LARGE, PRECISIONS, SMALL, STAGES, Precision, Size, Stage, trace_stage

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


def main() -> None:
    size, *names = sys.argv[1:]
    for row in rows(SIZES[size], names or STAGES, fused):
        print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
