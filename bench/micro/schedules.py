"""Schedules of whole steps: bubbles of sleeping stages, and times of GPT blocks.

Stages that sleep {nap_ms:.0f} ms, a tick, in the forward, for the gradient of their input and for that of
their weight; {MICROBATCHES} micro-batches; medians of {STEPS} steps. Gradients of inputs are sent before
those of weights are computed, so that the bubble of gpipe and 1f1b is less than (K - 1) / (M + K - 1).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.measure import Ratio, Table, report, samples, timing
from bench.models.gpt import blocks
from gpipe_fast import GPipe
from gpipe_fast.schedule import SCHEDULES, Action, Kind

NAP, STEPS, MICROBATCHES = 0.03, 3, 8
# Stages, ranks, and the ticks of a step, if a stage's F, I and W of a micro-batch take a tick each.
CASES: dict[str, tuple[int, int, str, Callable[[int, int], int]]] = {
    "gpipe": (4, 4, "3 M + 2 (K - 1)", lambda m, k: 3 * m + 2 * (k - 1)),
    "1f1b": (4, 4, "3 M + 2 (K - 1)", lambda m, k: 3 * m + 2 * (k - 1)),
    "zb-h1": (4, 4, "3 M + K - 1", lambda m, k: 3 * m + k - 1),
    "interleaved": (4, 2, "6 M + 2 (K / 2 - 1)", lambda m, k: 6 * m + 2 * (k // 2 - 1)),
}
WIDTH, BATCH, LENGTH, COUNT, ROUNDS = 256, 2, 128, 4, 15


@torch.library.custom_op("gpipe_fast_bench::nap", mutates_args=())
def nap(x: Tensor) -> Tensor:
    """Sleeps, and returns a copy of its input."""
    time.sleep(NAP)
    return x.clone()


nap.register_fake(torch.empty_like)


class Nap(torch.autograd.Function):
    """Sleeps as long in the forward, for the gradient of the input, and for that of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = torch.ops.gpipe_fast_bench.nap(x)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        sleep = torch.ops.gpipe_fast_bench.nap
        return sleep(gradients[0]), sleep(gradients[0].sum(0))


class Sleeper(nn.Module):
    """A layer that sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Nap.apply(x, self.weight)
        return found


def _pipe(layers: list[nn.Module], num_stages: int, schedule: str, mode: str) -> Any:
    pipe = GPipe(
        nn.Sequential(*layers),
        [len(layers) // num_stages] * num_stages,
        devices=["cpu"] * num_stages,
        chunks=MICROBATCHES,
        checkpoint=mode,
        schedule=schedule,
        backend="aten",
    )
    pipe.threads_per_stage = 1
    return pipe


def _sleeping() -> list[list[Any]]:
    """Returns a row for each schedule: its bubble by the formula, by its actions, and as measured."""
    rows = []
    x = torch.zeros(MICROBATCHES, 4, requires_grad=True)
    for name, (num_stages, num_ranks, formula, ticks) in CASES.items():
        pipe = _pipe([Sleeper() for _ in range(num_stages)], num_stages, name, "never")
        step = partial(pipe.step, x, loss_fn=Tensor.sum, normalizer=1)
        found = timing(samples({name: step}, STEPS)[name]).median / 1e6 / NAP
        schedule = SCHEDULES[name](num_stages, MICROBATCHES, recomputed=())
        expected = ticks(MICROBATCHES, num_stages)
        assert schedule.critical_path(_duration) == expected
        work = 3 * MICROBATCHES * num_stages / num_ranks
        bubbles = [f"{1 - work / each:.3f}" for each in (expected, found)]
        rows.append(
            [name, f"{num_stages} on {num_ranks}", formula, expected, found, found / expected, *bubbles]
        )
    return rows


def _duration(action: Action) -> float:
    return {Kind.F: 1.0, Kind.I: 1.0, Kind.W: 1.0, Kind.B: 2.0}.get(action.kind, 0.0)


def _gpt(schedule: str, mode: str) -> Any:
    torch.manual_seed(0)
    return _pipe(blocks(COUNT, WIDTH), 4 if schedule == "interleaved" else 2, schedule, mode)


def _text(length: int) -> Tensor:
    return torch.randn(BATCH * MICROBATCHES, length, WIDTH, generator=torch.Generator().manual_seed(1))


def _computing() -> list[list[Any]]:
    """Returns a row for each mode and schedule: the time of a step of GPT blocks in two stages."""
    rows, x = [], _text(LENGTH)
    for mode in ("never", "always"):
        steps = {name: partial(_gpt(name, mode).step, x, target=x, loss_fn=F.mse_loss) for name in SCHEDULES}
        found = samples(steps, ROUNDS)
        rows += [[mode, name, timing(t).ms(), str(Ratio.of(t, found["gpipe"]))] for name, t in found.items()]
    return rows


def main() -> None:
    tokens = BATCH * MICROBATCHES
    blocks_of_gpt = Table(
        "Steps of GPT blocks",
        ["checkpoint", "schedule", "ms per step [20%, 80%]", "relative to gpipe"],
        _computing(),
        f"{COUNT} GPT blocks of width {WIDTH}; {tokens} x {LENGTH} tokens in {MICROBATCHES} micro-batches, "
        "two stages with one thread each ('interleaved': four, on two ranks), by turns.\n",
    )
    report(
        globals(),
        "schedule | stages | ticks of a step | formula | measured | ratio | bubble | measured bubble",
        _sleeping(),
        [blocks_of_gpt],
        nap_ms=NAP * 1000.0,
    )
