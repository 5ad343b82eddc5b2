"""Steps of a two-stage GPT, compared with other implementations, each in its own processes."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.measure import Table, Timing, alternate, report
from bench.models.gpt import blocks
from bench.peers import (
    TOLERANCE,
    Candidate,
    Forward,
    ProcessCandidate,
    Step,
    TorchPipelining,
    checkpointed,
    describe_difference,
    gradients_agree,
    has_torchgpipe,
    join,
    looped,
    relative_difference,
)

STAGES, ROUNDS, PAUSE = 2, 15, 0.05
OURS, PIPELINING, TORCHGPIPE = "gpipe_fast", "torch.distributed.pipelining", "torchgpipe"
LOOP, WHOLE = "plain loop", "plain, whole mini-batch"

# Number of processes, and intra-op threads of each: every candidate gets two cores.
RESOURCES = {OURS: (1, 1), PIPELINING: (STAGES, 1), TORCHGPIPE: (1, 2), LOOP: (1, 2), WHOLE: (1, 2)}


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
    """

    recompute: bool
    chunks: int
    batch: int = 2
    length: int = 128
    width: int = 256
    count: int = 4

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


TINY_SIZES = (2, 1, 8, 8, 2)  # chunks, batch, length, width, count


def names(recompute: bool) -> list[str]:
    """Returns the names of the candidates."""
    found = [OURS, PIPELINING, LOOP, *([TORCHGPIPE] if has_torchgpipe() else [])]
    return found if recompute else [*found, WHOLE]


def make(number: int, name: str, case: Case, rendezvous: str) -> Candidate:
    """Builds the candidate in process `number`; first runs a tiny step, which triggers all lazy imports."""
    if name == PIPELINING:
        join(rendezvous, number, STAGES)
    build(number, name, Case(case.recompute, *TINY_SIZES))()
    return build(number, name, case)


def build(number: int, name: str, case: Case) -> Candidate:
    """Builds the part of a candidate that belongs to process `number`."""
    stages, (input, gradient) = case.stages(), case.data()
    model = nn.Sequential(*(layer for stage in stages for layer in stage))
    balance, mode = [len(stage) for stage in stages], "always" if case.recompute else "never"
    if name == PIPELINING:
        return TorchPipelining(number, stages, case.recompute, case.chunks, input, gradient)
    forward: Forward = model
    if name == OURS:
        from gpipe_fast import GPipe

        pipe = GPipe(model, balance, devices=["cpu"] * len(balance), chunks=case.chunks, checkpoint=mode)
        pipe.threads_per_stage = 1
        forward = pipe
    elif name == TORCHGPIPE:
        import torchgpipe

        devices = ["cpu"] * STAGES
        forward = torchgpipe.GPipe(model, balance, devices=devices, chunks=case.chunks, checkpoint=mode)
    elif name == LOOP:
        forward = looped(checkpointed(stages) if case.recompute else model, case.chunks)
    return Step(model.parameters(), forward, input, gradient)


def reference_gradients(case: Case) -> list[Tensor]:
    """Returns the gradients of the plain loop with one thread."""
    step = build(0, LOOP, case)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    step()
    torch.set_num_threads(before)
    return step.gradients()


@dataclass
class Result:
    """The measurements of one candidate.

    Attributes:
        off: relative gradient difference (see `relative_difference`).
        timing: step times; None if the gradients are wrong.
        peak_bytes: peak memory of a step; None if unknown.
        idle: share of a core that the candidate used while other candidates were timed.
    """

    off: float
    timing: Timing | None = None
    peak_bytes: int | None = None
    idle: float = 0.0


def measure(case: Case, names: Sequence[str], rounds: int) -> dict[str, Result]:
    """Compares the gradients of two steps, then times the candidates whose gradients are right."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        candidates: dict[str, ProcessCandidate] = {}
        for name in names:
            processes, threads = RESOURCES[name]
            candidate = ProcessCandidate(make, (name, case, str(folder / "rendezvous")), threads, processes)
            stack.callback(candidate.close)
            candidates[name] = candidate
        wanted = reference_gradients(case)
        results = {name: Result(0.0) for name in names}
        for name, candidate in candidates.items():
            for _ in range(2):
                candidate()
                results[name].off = max(results[name].off, relative_difference(candidate.gradients(), wanted))
            results[name].peak_bytes = candidate.peak_bytes()
        correct_candidates = {n: c for n, c in candidates.items() if gradients_agree(n, results[n].off)}
        start, before = time.perf_counter(), {n: c.idle_seconds() for n, c in candidates.items()}
        for name, timing in alternate(correct_candidates, rounds, pause=PAUSE).items():
            results[name].timing = timing
        elapsed = time.perf_counter() - start
        for name, candidate in candidates.items():
            results[name].idle = (candidate.idle_seconds() - before[name]) / elapsed
    return results


HEADERS = [
    "micro-batches",
    "candidate",
    "processes x threads",
    "ms: median [p20, p80]",
    "time / ours",
    "peak memory, MiB",
    "gradients",
]


def rows(case: Case, results: Mapping[str, Result]) -> list[list[object]]:
    """Returns one row per candidate; one whose gradients are wrong gets neither a time nor a ratio."""
    found: list[list[object]] = []
    ours = results[OURS].timing
    for name, result in results.items():
        processes, threads = RESOURCES[name]
        timing = result.timing
        found.append(
            [
                case.chunks,
                name,
                f"1 x {STAGES} stages" if name == OURS else f"{processes} x {threads}",
                timing.ms() if timing else "-",
                timing.median / ours.median if timing and ours else "-",
                "-" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:.0f}",
                describe_difference(name, result.off),
            ]
        )
    return found


def main() -> None:
    tables: dict[bool, list[list[object]]] = {True: [], False: []}
    idle = 0.0
    for recompute, chunks in itertools.product(tables, (8, 16)):
        case = Case(recompute, chunks)
        results = measure(case, names(recompute), ROUNDS)
        idle = max(idle, *(result.idle for result in results.values()))
        tables[recompute] += rows(case, results)
    report(
        "step",
        "Steps of two stages, full recomputation",
        HEADERS,
        tables[True],
        f"{case.count} GPT blocks of width {case.width}, 8 heads, K = {STAGES}, {case.batch} x {case.length} "
        "tokens per micro-batch; forward and backward from a given output gradient. Every candidate has its "
        f"own processes and threads for two cores. Candidates alternate; medians of {ROUNDS} steps. Waiting "
        f"candidates sleep: none used over {idle:.1%} of a core between its steps. Stages are recomputed "
        "as a whole; other candidates use non-reentrant torch.utils.checkpoint. torchgpipe's two CPU stages "
        "share one worker thread. Gradients are compared with the plain loop's with one thread: ours must be "
        f"equal, others may differ by {TOLERANCE:.0e} of the largest element of their tensor. Peak memory is "
        "what a step needs in all processes, beyond parameters, input and imported modules.\n",
        [Table("No recomputation", HEADERS, tables[False])],
    )


if __name__ == "__main__":
    main()
