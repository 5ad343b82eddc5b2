"""Steps of two stages of GPT blocks beside other implementations, each in its own processes.

The first table recomputes every micro-batch, the second none. {CASE.count} GPT blocks of width
{CASE.width}, 8 heads, K = {STAGES}, {CASE.batch} x {CASE.length} tokens per micro-batch; forward and
backward from a given output gradient. Every candidate has its own processes and threads for two cores;
waiting candidates sleep. Candidates alternate; medians of {ROUNDS} steps. Stages are recomputed as a whole;
other candidates use non-reentrant torch.utils.checkpoint. torchgpipe's two CPU stages share one worker
thread. Gradients are compared with the plain loop's with one thread: ours must be equal, others may differ
by {TOLERANCE:.0e} of the largest element of their tensor. Peak memory is what a step needs in all
processes, beyond parameters, input and imported modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn

from bench import resident
from bench.comparison import HEADERS, Comparison, Opened, one_thread, rows
from bench.measure import PAUSE, Table, report
from bench.models.gpt import blocks
from bench.peers import (
    Candidate,
    Forward,
    Step,
    TorchPipelining,
    checkpointed,
    has_torchgpipe,
    in_processes,
    join,
    looped,
)

STAGES, ROUNDS = 2, 15
OURS, PIPELINING, TORCHGPIPE = "gpipe_fast", "torch.distributed.pipelining", "torchgpipe"
LOOP, WHOLE = "plain loop", "plain, whole mini-batch"
COMPILED = "torch.compile"
RECOMPUTING, BUDGET = f"{COMPILED}, torch.utils.checkpoint", f"{COMPILED}, activation_memory_budget=0.5"

# Number of processes, and intra-op threads of each: every candidate gets two cores.
RESOURCES = {OURS: (1, 1), PIPELINING: (STAGES, 1)}
OTHERS = (1, 2)


@dataclass(frozen=True)
class Case:
    """A training step of GPT blocks on a mini-batch.

    Attributes:
        recompute: whether every micro-batch is recomputed, or none.
        chunks: number of micro-batches.
        batch: number of sequences in a micro-batch.
        length: length of each sequence.
        width: width of the blocks, which have 8 heads.
        count: number of blocks.
        backend: the backend of torch.compile.
    """

    recompute: bool = True
    chunks: int = 8
    batch: int = 2
    length: int = 128
    width: int = 256
    count: int = 4
    backend: str = "inductor"

    def stages(self) -> list[nn.Sequential]:
        """Returns the stages; their parameters are the same in every process."""
        torch.manual_seed(0)
        layers, size = blocks(self.count, self.width), self.count // STAGES
        return [nn.Sequential(*layers[i * size : (i + 1) * size]) for i in range(STAGES)]

    def data(self) -> tuple[Tensor, Tensor]:
        """Returns the mini-batch and the gradient of its output."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.batch * self.chunks, self.length, self.width)
        input, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
        return input, gradient

    def tiny(self) -> Case:
        """Returns a case that runs at once, with as many stages."""
        return replace(self, chunks=2, batch=1, length=8, width=8, count=STAGES)

    def reference_gradients(self) -> list[Tensor]:
        """Returns the gradients of the plain loop with one thread."""
        step = build(0, LOOP, self)
        with one_thread():
            step()
        return step.gradients()


CASE = Case()


def names(recompute: bool) -> list[str]:
    """Returns the names of the candidates."""
    found = [OURS, PIPELINING, LOOP, *([TORCHGPIPE] if has_torchgpipe() else [])]
    return found if recompute else [*found, WHOLE]


def make(number: int, name: str, port: int, case: Case) -> Candidate:
    """Builds the candidate in process `number`, before its memory counts.

    A tiny step triggers all lazy imports; if the candidate is compiled, a step of the case compiles it.
    """
    if name == PIPELINING:
        join(port, number, STAGES)
    if not name.startswith(COMPILED):
        build(number, name, case.tiny())()
        return build(number, name, case)
    step = build(number, name, case)
    step()
    for parameter in step.parameters:
        parameter.grad = None
    resident.release()
    return step


def build(number: int, name: str, case: Case) -> Step | TorchPipelining:
    """Builds the part of a candidate that belongs to process `number`."""
    stages, (input, gradient) = case.stages(), case.data()
    model = nn.Sequential(*(layer for stage in stages for layer in stage))
    if name == PIPELINING:
        return TorchPipelining(number, stages, case.recompute, case.chunks, input, gradient)
    mode: Any = "always" if case.recompute else "never"
    balance, devices = [len(stage) for stage in stages], ["cpu"] * STAGES
    forward: Forward = model
    if name.startswith(OURS):
        from gpipe_fast import GPipe

        share = name.partition("=")[2]
        mode = float(share) if share else mode
        pipe = GPipe(model, balance, devices=devices, chunks=case.chunks, checkpoint=mode)
        pipe.threads_per_stage = 1
        forward = pipe
    elif name == TORCHGPIPE:
        import torchgpipe

        forward = torchgpipe.GPipe(model, balance, devices=devices, chunks=case.chunks, checkpoint=mode)
    elif name != WHOLE:
        forward = checkpointed(stages) if case.recompute or name == RECOMPUTING else model
        if name == BUDGET:
            functorch_config.activation_memory_budget = 0.5
        if name.startswith(COMPILED):
            forward = torch.compile(forward, backend=case.backend, dynamic=False)
        forward = looped(forward, case.chunks)
    return Step(model.parameters(), forward, input, gradient)


def comparison(case: Case, names: Sequence[str], title: str = "") -> Comparison:
    """Returns the comparison of candidates, each in processes of its own."""

    def opened(stack: ExitStack) -> Opened:
        resources = {name: RESOURCES.get(name.partition(",")[0], OTHERS) for name in names}
        return in_processes(make, resources, (case,), stack), case.reference_gradients()

    sampled = not title and case.chunks == 8
    title = (
        title or f"step of GPT blocks, M = {case.chunks}, {'all' if case.recompute else 'none'} recomputed"
    )
    return Comparison(title, names, opened, ROUNDS, pause=PAUSE, sampled=sampled)


COMPARISONS = [
    comparison(Case(recompute, chunks), names(recompute)) for recompute in (True, False) for chunks in (8, 16)
]


def main() -> None:
    headers, found = ["micro-batches", *HEADERS], list[list[list[object]]]()
    for recompute in (True, False):
        found.append([])
        for chunks in (8, 16):
            outcomes = comparison(Case(recompute, chunks), names(recompute)).measure()
            found[-1] += [[chunks, *row] for row in rows(outcomes, OURS)]
    report(globals(), headers, found[0], [Table("No recomputation", headers, found[1])])
