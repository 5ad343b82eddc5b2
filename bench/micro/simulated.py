"""Step times predicted from the durations of one recorded setting, compared with measured ones.

Median error of {count} predictions: {typical:.1%}; largest: {largest:.1%}. One setting is recorded for each
model and number of stages: {RECORDED}. In a prediction, an action takes the median of its kind and stage
there, among the micro-batches that are recomputed or the others, and the simulator runs the schedule of the
other setting. A micro-batch has the same size in all settings: 512 rows in 8 layers of 512 x 512, or 128
tokens in 4 blocks of width 256. One thread per stage, by turns, medians of {ROUNDS} recorded steps; the loss
between a call and its backward is left out. Each stage is taken to have a core of its own, and this machine
has {cores}: with more stages than cores, or beside other work, predictions do not hold. With M = 1, no two
stages compute at the same time, so its prediction is too long if concurrent stages slow each other down.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench.measure import report
from bench.models.gpt import blocks
from gpipe_fast import GPipe
from gpipe_fast.reports.advice import Costs, phases_for
from gpipe_fast.reports.recording import Recording
from gpipe_fast.schedule import Action, Kind, Schedule

ROUNDS = 11


@dataclass(frozen=True)
class Setting:
    """How a mini-batch runs.

    Attributes:
        schedule: the name of the schedule.
        chunks: M. A micro-batch has the same size in all settings.
        checkpoint: the checkpoint mode.
        is_step: whether it is a `GPipe.step`; otherwise a call and its backward, whose schedule is gpipe.
    """

    schedule: str
    chunks: int
    checkpoint: str
    is_step: bool = True

    def __str__(self) -> str:
        call = "step" if self.is_step else "call and backward"
        return f"{self.schedule}, M = {self.chunks}, {self.checkpoint}, {call}"


RECORDED = Setting("gpipe", 4, "except_last")
PREDICTED = [
    Setting("gpipe", 1, "never"),
    Setting("gpipe", 3, "except_last", is_step=False),
    Setting("gpipe", 8, "always", is_step=False),
    Setting("1f1b", 8, "except_last"),
    Setting("1f1b", 6, "never"),
]


@dataclass(frozen=True)
class Model:
    """Layers, and the input of one micro-batch.

    Attributes:
        name: the name of the model.
        make: makes its layers.
        microbatch: the shape of one micro-batch.
    """

    name: str
    make: Callable[[], Sequence[nn.Module]]
    microbatch: tuple[int, ...]

    def step(self, num_stages: int, setting: Setting) -> Callable[[], Recording]:
        """Returns a function that runs and records a step."""
        torch.manual_seed(0)
        layers = self.make()
        pipe = GPipe(
            nn.Sequential(*layers),
            [len(layers) // num_stages] * num_stages,
            devices=["cpu"] * num_stages,
            chunks=setting.chunks,
            checkpoint=setting.checkpoint,
            schedule=setting.schedule,
        )
        pipe.threads_per_stage = 1
        x = torch.randn(setting.chunks * self.microbatch[0], *self.microbatch[1:])

        def run() -> Recording:
            pipe.zero_grad()
            with pipe.recording() as recording:
                if setting.is_step:
                    pipe.step(x, target=x, loss_fn=F.mse_loss)
                else:
                    output: Any = pipe(x)
                    F.mse_loss(output, x).backward()
            return recording

        return run


def _mlp(width: int, count: int) -> list[nn.Module]:
    return [layer for _ in range(count) for layer in (nn.Linear(width, width), nn.ReLU())]


MODELS = [
    Model("MLP", lambda: _mlp(512, 8), (512, 512)),
    Model("GPT blocks", lambda: blocks(4, 256), (1, 128, 256)),
]


def predict(costs: Costs, setting: Setting) -> float:
    """Returns the seconds of a step in another setting, from the durations of the recorded one.

    An action takes the median of its class: a forward takes longer if nothing is recomputed later, because it
    writes all activations.
    """
    recorded: defaultdict[tuple[int, Kind, bool], list[float]] = defaultdict(list)
    for action, class_ in _classes(costs.phases).items():
        recorded[class_].append(costs.seconds[action])
    phases = phases_for(setting.schedule, costs, setting.chunks, setting.checkpoint, setting.is_step)
    seconds = {action: median(recorded[class_]) for action, class_ in _classes(phases).items()}
    return Costs(phases, seconds).time()


def _classes(phases: Sequence[Schedule]) -> dict[Action, tuple[int, Kind, bool]]:
    """Returns the stage and the kind of each action, and whether its micro-batch is recomputed."""
    actions = [action for phase in phases for action in phase.order()]
    recomputed = {action.microbatch for action in actions if action.kind is Kind.R}
    return {action: (action.stage, action.kind, action.microbatch in recomputed) for action in actions}


def measure(
    model: Model, num_stages: int, settings: Sequence[Setting] = PREDICTED, rounds: int = ROUNDS
) -> dict[Setting, tuple[float, float]]:
    """Returns the predicted and the measured seconds of each setting; all run by turns."""
    steps = {setting: model.step(num_stages, setting) for setting in (RECORDED, *settings)}
    found: dict[Setting, list[Recording]] = {setting: [] for setting in steps}
    for index in range(rounds + 1):
        for setting, step in steps.items():
            recording = step()
            if index:  # the first round is a warm-up
                found[setting].append(recording)
    recorded = found[RECORDED]
    costs = Costs.of(recorded[0].phases(), [each.latest for each in recorded])
    return {
        setting: (predict(costs, setting), median(each.span() for each in found[setting]))
        for setting in settings
    }


def rows(
    model: Model, num_stages: int, found: Mapping[Setting, tuple[float, float]], cores: int
) -> list[list[object]]:
    """Returns a row for each setting; the error is left out if there are more stages than cores."""
    return [
        [
            model.name,
            num_stages,
            str(setting),
            predicted * 1e3,
            measured * 1e3,
            f"{predicted / measured - 1:+.1%}" if num_stages <= cores else "more stages than cores",
        ]
        for setting, (predicted, measured) in found.items()
    ]


def main() -> None:
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    table: list[list[object]] = []
    errors = []
    for model in MODELS:
        for num_stages in (1, 2):
            found = measure(model, num_stages)
            table += rows(model, num_stages, found, cores)
            if num_stages <= cores:
                errors += [abs(predicted / measured - 1) for predicted, measured in found.values()]
    report(
        globals(),
        ["model", "stages", "setting", "predicted, ms", "measured, ms", "error"],
        table,
        count=len(errors),
        typical=median(errors),
        largest=max(errors),
        cores=cores,
    )
