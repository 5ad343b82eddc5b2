"""Steps of 2 x 2 processes with tensor-parallel layers, compared with torch.distributed.pipelining.

Two stages of {case.count} blocks of Llama, whose layers `parallelize_module` has divided between {TENSOR}
processes: width {case.width}, 8 heads and 4 of keys and values, {case.batch} x {case.length} tokens per
micro-batch, M = {case.chunks}, no recomputation; 'small' has width {small.width} and {small.batch} x
{small.length} tokens. Both candidates have the same modules and schedule, and {PROCESSES} processes with one
intra-op thread each, on this machine, and exchange tensors by gloo. A step without an update. Candidates
alternate. Gradients are compared with those of the plain loop over the same modules in {TENSOR} processes,
which adds them up in the order of the schedule: ours must be equal, others may differ by {TOLERANCE:.0e} of
the largest element of their tensor. Peak memory is that of all processes, beyond the memory before the first
step. The second table has its parts: what the first steps leave, which are gradients, the traces' objects and
modules, and the allocator's fragments; and what a step adds to it, which are activations and messages.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bench.compare import step
from bench.compare.distributed import SCHEDULES, Ours
from bench.compare.step import LOOP, OURS, PIPELINING, STAGES
from bench.comparison import HEADERS, Comparison, Opened, rows
from bench.measure import PAUSE, Table, report
from bench.models.llama import Block, llama
from bench.peers import Candidate, TorchPipelining, in_processes, join, weighted_sum

TENSOR = 2
PROCESSES = STAGES * TENSOR
_COLUMNS, _ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


@dataclass(frozen=True)
class Case(step.Case):
    """As of other tables, with blocks of Llama; ``count`` is that of each stage."""

    recompute: bool = False
    count: int = 2

    def parallel_stages(self, mesh: DeviceMesh) -> list[nn.Sequential]:
        """Returns the stages, of which this process has its part along a mesh."""
        torch.manual_seed(0)
        stages = [llama(self.count, self.width, 8, 4, 3 * self.width, self.length) for _ in range(STAGES)]
        for module in nn.Sequential(*stages).modules():
            if isinstance(module, Block):
                plan: dict[str, Any] = dict.fromkeys(_COLUMNS, ColwiseParallel())
                plan |= dict.fromkeys(_ROWS, RowwiseParallel())
                parallelize_module(module, mesh, plan)
        return stages


CASES = {"large": Case(), "small": Case(batch=1, length=32, width=64)}


class Loop:
    """The plain loop over micro-batches in the processes of one stage."""

    def __init__(self, case: Case, schedule: str, stages: list[nn.Sequential]) -> None:
        self.model, self.schedule, self.case = nn.Sequential(*stages), schedule, case

    def __call__(self) -> None:
        self.model.zero_grad()
        losses = [
            weighted_sum(self.model(x), y)
            for x, y in zip(*(each.chunk(self.case.chunks) for each in self.case.data()), strict=True)
        ]
        for loss in [sum(losses, losses[0].new_zeros(()))] if self.schedule == "gpipe" else losses:
            loss.backward()

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


class Whole:
    """A candidate, of whose gradients the first process of each group returns all, and the others none."""

    def __init__(self, candidate: Candidate, is_first: bool) -> None:
        self._candidate, self._is_first = candidate, is_first

    def __call__(self) -> None:
        self._candidate()

    def gradients(self) -> list[Tensor]:
        found: list[Any] = self._candidate.gradients()
        whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]
        return whole if self._is_first else []


def make(number: int, name: str, port: int, case: Case, schedule: str) -> Candidate:
    """Builds the part of a candidate that belongs to process ``number``."""
    num_stages = 1 if name == LOOP else STAGES
    join(port, number, num_stages * TENSOR)
    mesh = init_device_mesh("cpu", (num_stages, TENSOR), mesh_dim_names=("pp", "tp"))
    stages = case.parallel_stages(mesh["tp"])
    made: Candidate
    if name == OURS:
        made = Ours(case, schedule, stages, mesh)
    elif name == LOOP:
        made = Loop(case, schedule, stages)
    else:
        group = mesh.get_group("pp")
        arguments = stages, case.recompute, case.chunks, *case.data(), schedule, group
        made = TorchPipelining(mesh.get_local_rank("pp"), *arguments)
    return Whole(made, mesh.get_local_rank("tp") == 0)


def _opened(case: Case, schedule: str, stack: ExitStack) -> Opened:
    with ExitStack() as loops:
        (loop,) = in_processes(make, {LOOP: (TENSOR, 1)}, (case, schedule), loops).values()
        loop()
        wanted = loop.gradients()
    resources = dict.fromkeys((OURS, PIPELINING), (PROCESSES, 1))
    return in_processes(make, resources, (case, schedule), stack), wanted


def comparison(size: str, schedule: str) -> Comparison:
    """Returns the comparison of the steps of a case."""
    title = f"step of 2 x 2 processes, tensor parallel, {size}, {schedule}"
    return Comparison(title, [OURS, PIPELINING], partial(_opened, CASES[size], schedule), pause=PAUSE)


COMPARISONS = [comparison(size, schedule) for size in CASES for schedule in SCHEDULES]


def main() -> None:
    found = {each.name: each.measure() for each in COMPARISONS}
    table = [[name, *row] for name, outcomes in found.items() for row in rows(outcomes, OURS)]
    parts = [
        [name, candidate, *(f"{each / 2**20:.0f}" for each in outcome.parts_of_peak or ())]
        for name, outcomes in found.items()
        for candidate, outcome in outcomes.items()
    ]
    memory = Table(
        "Peak memory", "comparison | candidate | the first steps leave, MiB | a step adds, MiB", parts
    )
    report(globals(), ["comparison", *HEADERS], table, [memory], case=CASES["large"], small=CASES["small"])
