"""Overhead of a step beyond its operators: the stages are so small that little else remains."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from copy import deepcopy
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from bench.measure import ROOT, Table, Timing, alternate, report
from bench.models.mlp import mlp
from bench.peers import (
    TOLERANCE,
    Candidate,
    Step,
    checkpointed,
    describe_difference,
    gradients_agree,
    has_torchgpipe,
    looped,
    relative_difference,
)
from bench.progress import shown
from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.recording.recording import Recording

STAGES, CHUNKS, BATCH, WIDTH = 4, 8, 64, 64
ROUNDS, CALLS = 40, 20
LOOP, WHOLE, CHECKPOINTED = "plain loop", "plain, whole mini-batch", "plain loop, checkpoint"


class Overhead:
    """The candidates; each has its own model, and all models have equal parameters."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._layers = [layer for _ in range(STAGES) for layer in mlp(WIDTH)]
        self._input, self._gradient = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)

    def plain(self) -> dict[str, Step]:
        """Returns plain PyTorch steps: the loop that all others must equal, then its variants."""
        loop, whole, model = (self._model() for _ in range(3))
        size = len(model) // STAGES
        stages = [model[first : first + size] for first in range(0, len(model), size)]
        return {
            LOOP: self._step(loop, looped(loop, CHUNKS)),
            WHOLE: self._step(whole, whole),
            CHECKPOINTED: self._step(model, looped(checkpointed(stages), CHUNKS)),
        }

    def ours(self, mode: str, stages: int = STAGES) -> Step:
        model = self._model()
        balance = [len(model) // stages] * stages
        pipe = GPipe(model, balance, devices=["cpu"] * stages, chunks=CHUNKS, checkpoint=mode)
        return self._step(pipe, pipe)

    def torchgpipe(self, mode: str) -> Step:
        import torchgpipe

        model = self._model()
        balance, devices = [len(model) // STAGES] * STAGES, ["cpu"] * STAGES
        pipe = torchgpipe.GPipe(model, balance, devices=devices, chunks=CHUNKS, checkpoint=mode)
        return self._step(pipe, pipe)

    def _model(self) -> nn.Sequential:
        return nn.Sequential(*deepcopy(self._layers))

    def _step(self, model: nn.Module, forward: Any) -> Step:
        return Step(model.parameters(), forward, self._input, self._gradient)


def candidates() -> dict[str, Step]:
    """Returns the candidates by name; a name ends in the checkpoint mode, if the candidate has one."""
    overhead = Overhead()
    found = overhead.plain()
    for mode in CHECKPOINT_MODES:
        for stages in (STAGES, 2, 1):
            found[f"gpipe_fast, K = {stages}, {mode}"] = overhead.ours(mode, stages)
        if has_torchgpipe():
            found[f"torchgpipe, K = {STAGES}, {mode}"] = overhead.torchgpipe(mode)
    return found


def differences(candidates: Mapping[str, Candidate]) -> dict[str, float]:
    """Returns each candidate's largest gradient difference from the plain loop, over two steps."""
    found: dict[str, float] = {}
    for _ in range(2):
        for candidate in shown(list(candidates.values()), "comparing gradients"):
            candidate()
        wanted = candidates[LOOP].gradients()
        for name, candidate in candidates.items():
            found[name] = max(found.get(name, 0.0), relative_difference(candidate.gradients(), wanted))
    return found


def rows(timings: Mapping[str, Timing], differences: Mapping[str, float]) -> list[list[object]]:
    """Returns one row per candidate; one whose gradients are wrong gets neither a time nor a ratio."""
    result: list[list[object]] = []
    for name, off in differences.items():
        time, ours, loop = (timings.get(n) for n in (name, _comparable_name(name), LOOP))
        result.append(
            [
                name,
                time.ms() if time else "-",
                time.median / ours.median if time and ours else "-",
                loop.median / time.median if time and loop else "-",
                describe_difference(name, off),
            ]
        )
    return result


def _comparable_name(name: str) -> str:
    """Returns which of our candidates this one is compared with: the one of its checkpoint mode."""
    mode = name.rpartition(", ")[2]
    instead = "always" if name == CHECKPOINTED else "never"
    return f"gpipe_fast, K = {STAGES}, {mode if mode in CHECKPOINT_MODES else instead}"


class _TimedPipeline:
    """Wraps a C++ pipeline and records when its forward is called and when it returns."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self.called = self.returned = 0.0

    def forward(self, *arguments: object) -> list[Tensor]:
        self.called = time.monotonic()
        outputs: list[Tensor] = self._pipeline.forward(*arguments)
        self.returned = time.monotonic()
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)


# The parts into which a step is cut, in the order of time.
PARTS = (
    "Python before the C++ call",
    "C++ call to first F",
    "forward: first to last action",
    "last forward action to the end of the C++ call",
    "Python after the C++ call",
    "start of backward to first B, including autograd",
    "backward: first to last action",
    "last backward action to the end of backward",
)
TOTALS = ("whole step, recorded", "critical path of its actions", "all actions of all stages")


def part_times(step: Step, rounds: int) -> list[float]:
    """Returns the median time (µs) of each of `PARTS` and `TOTALS` over `rounds` consecutive steps."""
    pipe = step.forward
    assert isinstance(pipe, GPipe)
    step()
    timed_pipeline = _TimedPipeline(pipe._pipeline)
    pipe._pipeline = timed_pipeline  # type: ignore[assignment]
    marks: list[tuple[float, ...]] = []
    with pipe.recording() as recording:  # one for all steps: starting it evicts CPU caches
        for _ in range(rounds):
            for parameter in step.parameters:
                parameter.grad = None
            start = time.monotonic()
            output = pipe(step.input)
            forward_end = time.monotonic()
            output.backward(step.gradient)
            marks.append(
                (start, timed_pipeline.called, timed_pipeline.returned, forward_end, time.monotonic())
            )
    pipe._pipeline = timed_pipeline._pipeline
    samples = [_split_times(one, *times) for one, times in zip(_steps(recording), marks, strict=True)]
    return [median(column) * 1e6 for column in zip(*samples, strict=True)]


def _steps(recording: Recording) -> Iterator[Recording]:
    """Yields one recording per step; a step is a forward run and the backward run after it."""
    runs = sorted({event.run for stage in recording.stages for event in stage})
    for both in zip(runs[::2], runs[1::2], strict=True):
        one = Recording()
        one.stages = tuple(tuple(e for e in stage if e.run in both) for stage in recording.stages)
        yield one


def _split_times(
    step: Recording, start: float, called: float, returned: float, forward_end: float, end: float
) -> list[float]:
    spans = []
    for phase in step.phases():
        events = [step.latest[action] for action in phase.order()]
        spans.append((min(e.begin for e in events), max(e.end for e in events)))
    forward, backward = spans
    marks = [start, called, *forward, returned, forward_end, *backward, end]
    between = [after - before for before, after in itertools.pairwise(marks)]
    return [*between, end - start, step.critical_path(), sum(step.seconds().values())]


def breakdown(rounds: int) -> Table:
    """Returns a table that divides the time of our steps into parts."""
    overhead = Overhead()
    sizes = [(stages, mode) for stages in (STAGES, 2, 1) for mode in CHECKPOINT_MODES]
    shown_sizes = shown(sizes, "recording the parts of steps")
    columns = [part_times(overhead.ours(mode, stages), rounds) for stages, mode in shown_sizes]
    by_part = zip(PARTS + TOTALS, *columns, strict=True)
    return Table(
        "Breakdown of our steps",
        ["median µs", *(f"K = {stages}, {mode}" for stages, mode in sizes)],
        [[part, *times] for part, *times in by_part],
        f"Medians of {rounds} consecutive recorded steps; the medians add up only approximately to the "
        "median of the step. The critical path replays the schedule with the measured durations. If there "
        "are more stages than cores, an action's duration includes the time that it waits for a core.\n",
    )


def measure(rounds: int, calls: int) -> list[list[object]]:
    found = candidates()
    off = differences(found)
    correct_candidates = {
        name: candidate for name, candidate in found.items() if gradients_agree(name, off[name])
    }
    return rows(alternate(correct_candidates, rounds, calls), off)


def measure_in_this_process() -> None:
    """Runs the benchmark in this process, whose threads must have one OpenMP thread each."""
    torch.set_num_threads(1)
    report(
        "overhead",
        "Overhead of a step beyond its operators",
        [
            "candidate",
            "ms: median [p20, p80]",
            "time / ours",
            "plain loop / time",
            "gradients",
        ],
        measure(ROUNDS, CALLS),
        f"{STAGES} stages of 2 x (Linear({WIDTH}, {WIDTH}), ReLU), {CHUNKS} micro-batches, batch {BATCH}; "
        "forward and backward from a given output gradient, starting without gradients. All candidates run "
        f"alternately in one process under OMP_NUM_THREADS=1; medians of {ROUNDS} samples of {CALLS} steps. "
        f"'Ours' is gpipe_fast with K = {STAGES} and the same checkpoint mode; the checkpointed loop is "
        "compared with 'always', other candidates without a mode with 'never'. Gradients are compared with "
        "the plain loop's: ours must be equal, others may differ by "
        f"{TOLERANCE:.0e} of the largest element of their tensor.\n",
        [breakdown(5 * ROUNDS)],
    )


def main() -> None:
    # torchgpipe starts threads in every step; only the environment can limit their OpenMP threads.
    command = [sys.executable, "-m", "bench.compare.overhead"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=ROOT, env=environment)


if __name__ == "__main__":
    measure_in_this_process()
