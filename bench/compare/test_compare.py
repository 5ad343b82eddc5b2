"""Steps beside torchgpipe, torch.distributed.pipelining, plain PyTorch and torch.compile."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from bench.compare import distributed, frontier, overhead, step
from bench.comparison import Comparison, Opened, Outcome, Series
from bench.peers import has_torchgpipe

OVERHEAD = {
    mode: [
        f"gpipe_fast, K = {overhead.STAGES}, {mode}",
        f"gpipe_fast, K = 1, {mode}",
        *([f"torchgpipe, K = {overhead.STAGES}, {mode}"] if has_torchgpipe() else []),
        overhead.LOOP,
        plain,
    ]
    for mode, plain in (("never", overhead.WHOLE), ("always", overhead.CHECKPOINTED))
}
# What is compared with torch.compile in the sample takes minutes to compile, so it is not in the sample.
FRONTIER = [
    frontier.name_of(1.0),
    *map(frontier.name_of, (0.5, 0.0)),
    step.LOOP,
    frontier.COMPILED,
    frontier.RECOMPUTING,
    frontier.BUDGET,
]


def tiny(mode: str, stack: ExitStack) -> Opened:
    found = overhead.candidates()
    loop = found[overhead.LOOP]
    loop()
    wanted = [gradient.clone() for gradient in loop.gradients()]
    return {name: found[name] for name in OVERHEAD[mode]}, wanted


COMPARISONS = [
    *(
        Comparison(f"overhead, {mode}", names, partial(tiny, mode), rounds=40, calls=5, sampled=True)
        for mode, names in OVERHEAD.items()
    ),
    *(
        step.comparison(step.Case(recompute, chunks), step.names(recompute))
        for recompute in (True, False)
        for chunks in (8, 16)
    ),
    frontier.comparison(frontier.CASE, FRONTIER),
    *(
        Series(
            f"step of two processes, {schedule}, {size}",
            [step.OURS, step.PIPELINING],
            partial(distributed.measure, case, schedule, distributed.LINKS[0], distributed.ROUNDS),
        )
        for size, case in distributed.CASES.items()
        for schedule in distributed.SCHEDULES
    ),
]


def test_compare(measured: Outcome) -> None:
    """Measures a candidate of `COMPARISONS`."""
