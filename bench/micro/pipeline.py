"""Two concurrent stages of GPT blocks: a step's time, compared with the minimum that its actions need.

K = 2 stages of 2 GPT blocks of width {WIDTH} each, {BATCH} x {LENGTH} tokens per micro-batch. Each
micro-batch is recomputed; one intra-op thread per stage; medians of {ROUNDS} steps. A critical path replays
the schedule with measured durations, a step's own one with the durations of the same step. Programs timed
alone run while the other stage's core is idle; the ratio of I to W is taken from the step. The upper bound is
the speedup over one stage if only the schedule costs time.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bench.measure import report
from bench.models.gpt import blocks
from gpipe_fast import GPipe
from gpipe_fast.reports.recording import Recording
from gpipe_fast.schedule import TRANSFERS, Action, Kind, fill_drain

WIDTH, LENGTH, BATCH, ROUNDS = 256, 128, 2, 15
Layers = Sequence[nn.Module]


class Step:
    """One recorded training step with full recomputation, from a given gradient of its output."""

    def __init__(self, stages: Sequence[Layers], input: Tensor, chunks: int) -> None:
        layers = nn.Sequential(*(layer for stage in stages for layer in stage))
        balance, devices = [len(stage) for stage in stages], ["cpu"] * len(stages)
        self.model = GPipe(layers, balance, devices=devices, chunks=chunks, checkpoint="always")
        self.model.threads_per_stage = 1
        self.input = input
        self.gradient = torch.randn_like(input)

    def __call__(self) -> tuple[float, Recording]:
        """Runs a step; returns its wall time in seconds and its recording."""
        self.model.zero_grad()
        with self.model.recording() as recording:
            start = time.perf_counter()
            self.model(self.input).backward(self.gradient)
            seconds = time.perf_counter() - start
        return seconds, recording


def measure(num_microbatches: int) -> list[object]:
    """Returns one row; each round runs the whole step and each stage alone, on an otherwise idle machine."""
    stages = [blocks(2, WIDTH), blocks(2, WIDTH)]
    input = torch.randn(BATCH * num_microbatches, LENGTH, WIDTH)
    whole = Step(stages, input, num_microbatches)
    # The second stage's input needs a gradient, as it does inside the pipeline.
    single_stages = [
        Step(stages[:1], input, num_microbatches),
        Step(stages[1:], input.clone().requires_grad_(), num_microbatches),
    ]
    steps, path_ratios, shares, seconds = [], [], [], defaultdict(list)
    for index in range(ROUNDS + 1):
        step, recording = whole()
        by_stage = [stage()[1].seconds() for stage in single_stages]
        if index == 0:
            continue
        steps.append(step)
        path_ratios.append(step / recording.critical_path())
        shares.append(_input_gradient_share(recording))
        for stage, found in enumerate(by_stage):
            for action, taken in found.items():
                seconds[Action(stage, action.kind, action.microbatch)].append(taken)
    schedule = fill_drain(2, num_microbatches, recomputed=range(num_microbatches))
    share = {Kind.I: statistics.median(shares), Kind.W: 1 - statistics.median(shares)}

    def median(action: Action) -> float:
        if action.kind in share:  # a stage alone has no neighbour and does not split B into I and W
            return share[action.kind] * median(Action(action.stage, Kind.B, action.microbatch))
        return statistics.median(seconds[action]) if action.kind not in TRANSFERS else 0.0

    ideal = sum(part.critical_path(median) for part in (schedule.forward_part(), schedule.backward_part()))
    one_stage = sum(median(action) for action in seconds)
    step = statistics.median(steps)
    return [
        num_microbatches,
        step * 1e3,
        statistics.median(path_ratios),
        ideal * 1e3,
        step / ideal,
        one_stage / step,
        one_stage / ideal,
    ]


def _input_gradient_share(recording: Recording) -> float:
    """Returns the share of I in the time of I and W."""
    taken = {
        kind: sum(s for action, s in recording.seconds().items() if action.kind is kind)
        for kind in (Kind.I, Kind.W)
    }
    return taken[Kind.I] / sum(taken.values())


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [measure(num_microbatches) for num_microbatches in (8, 16)]
    report(
        globals(),
        "micro-batches | step, ms | step / its critical path | critical path of programs "
        "timed alone, ms | step / critical path alone | all programs alone / step | upper"
        " bound",
        rows,
    )
