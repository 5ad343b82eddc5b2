"""Steps of two processes, compared with torch.distributed.pipelining under the same schedules.

{case.count} GPT blocks of width {case.width}, 8 heads, {case.batch} x {case.length} tokens per micro-batch, M
= {case.chunks}, full recomputation; 'small' has blocks of width {small.width} and {small.batch} x
{small.length} tokens, so that messages and waits take most of the time. A step without an update. Each
candidate has {STAGES} processes with one intra-op thread. Tensors travel by gloo, through the loopback
device. The other candidate recomputes by non-reentrant torch.utils.checkpoint. Candidates alternate.
Gradients are compared with those of the plain loop with one thread, which adds them up in the order of the
schedule: ours must be equal, others may differ by {TOLERANCE:.0e} of the largest element of their tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from bench.compare.step import OURS, PIPELINING, STAGES, Case
from bench.comparison import HEADERS, Comparison, Opened, one_thread, rows
from bench.measure import PAUSE, report
from bench.peers import Candidate, TorchPipelining, in_processes, join, weighted_sum

SCHEDULES = ("gpipe", "1f1b")
CASES = {"large": Case(), "small": Case(batch=1, length=32, width=64)}


class Ours:
    """One rank's part of a step of a GPipe with a mesh, in its own process."""

    def __init__(self, case: Case, schedule: str, stages: Sequence[nn.Sequential], mesh: Any) -> None:
        from gpipe_fast import GPipe

        self.model = GPipe(
            nn.Sequential(*itertools.chain(*stages)),
            [len(stage) for stage in stages],
            chunks=case.chunks,
            checkpoint="always" if case.recompute else "never",
            schedule=schedule,
            mesh=mesh,
        )
        self.parameters = [p for p in self.model.parameters() if not p.is_meta]
        self.input, self.weights = case.data()

    def __call__(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.model.step(self.input, target=self.weights, loss_fn=weighted_sum, normalizer=1)

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]


def make(number: int, name: str, port: int, case: Case, schedule: str) -> Candidate:
    """Builds the part of a candidate that belongs to process ``number``."""
    join(port, number, STAGES)
    if name == OURS:
        return Ours(case, schedule, case.stages(), dist.group.WORLD)
    return TorchPipelining(number, case.stages(), case.recompute, case.chunks, *case.data(), schedule)


def wanted_gradients(case: Case, schedule: str) -> list[Tensor]:
    """Returns the gradients of the plain loop with one thread, added up in the order of the schedule."""
    if schedule == "gpipe":
        return case.reference_gradients()
    model = nn.Sequential(*itertools.chain(*case.stages()))
    with one_thread():
        for input, gradient in zip(*(x.chunk(case.chunks) for x in case.data()), strict=True):
            model(input).backward(gradient)
    return [p.grad for p in model.parameters() if p.grad is not None]


def _opened(case: Case, schedule: str, stack: ExitStack) -> Opened:
    resources = dict.fromkeys((OURS, PIPELINING), (STAGES, 1))
    return in_processes(make, resources, (case, schedule), stack), wanted_gradients(case, schedule)


def comparison(size: str, schedule: str) -> Comparison:
    """Returns the comparison of the steps of a case."""
    title = f"step of two processes, {size}, {schedule}, loopback"
    opened = partial(_opened, CASES[size], schedule)
    return Comparison(title, [OURS, PIPELINING], opened, rounds=25, pause=PAUSE)


COMPARISONS = [comparison(size, schedule) for size in CASES for schedule in SCHEDULES]


def main() -> None:
    table = [[each.name, *row] for each in COMPARISONS for row in rows(each.measure(), OURS)]
    report(globals(), ["comparison", *HEADERS], table, case=CASES["large"], small=CASES["small"])
