"""Schedules of whole steps: bubbles of sleeping stages, times of GPT blocks, and updates in the drain.

Stages that sleep {nap_ms:.0f} ms, a tick, in the forward, for the gradient of their input and for that of
their weight; {MICROBATCHES} micro-batches; medians of 5 steps. Gradients of inputs are sent before those of
weights are computed, so that the bubble of gpipe and 1f1b is less than (K - 1) / (M + K - 1).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from bench.measure import Ratio, Table, report, samples, timing
from bench.models.gpt import blocks
from gpipe_fast import GPipe
from gpipe_fast.schedule import SCHEDULES, Action, Kind

NAP = 0.05
MICROBATCHES = 8
# Schedule, stages, ranks, and the ticks of a step, if a stage's F, I and W of a micro-batch take a tick each.
CASES: dict[str, tuple[int, int, str, Callable[[int, int], int]]] = {
    "gpipe": (4, 4, "3 M + 2 (K - 1)", lambda m, k: 3 * m + 2 * (k - 1)),
    "1f1b": (4, 4, "3 M + 2 (K - 1)", lambda m, k: 3 * m + 2 * (k - 1)),
    "zb-h1": (4, 4, "3 M + K - 1", lambda m, k: 3 * m + k - 1),
    "interleaved": (4, 2, "6 M + 2 (K / 2 - 1)", lambda m, k: 6 * m + 2 * (k // 2 - 1)),
}
WIDTH, BATCH, LENGTH, COUNT, ROUNDS = 256, 2, 256, 8, 15
UPDATE_LENGTH = 64
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": AdamW,
    "AdamW(fused=True)": lambda parameters: AdamW(parameters, fused=True),
    "SGD(momentum=0.9)": lambda parameters: SGD(parameters, momentum=0.9),
}

_nap_defined = False


def _define_nap() -> None:
    """Defines an operator that sleeps and returns a copy of its input."""
    global _nap_defined
    if _nap_defined:
        return
    _nap_defined = True

    @torch.library.custom_op("gpipe_fast_bench::nap", mutates_args=())
    def nap(x: Tensor) -> Tensor:
        time.sleep(NAP)
        return x.clone()

    nap.register_fake(lambda x: torch.empty_like(x))


class Nap(torch.autograd.Function):
    """Sleeps as long in the forward, for the gradient of the input, and for that of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = torch.ops.gpipe_fast_bench.nap(x)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        nap = torch.ops.gpipe_fast_bench.nap
        return nap(gradients[0]), nap(gradients[0].sum(0))


class Sleeper(nn.Module):
    """A layer that sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Nap.apply(x, self.weight)
        return found


def _pipe(layers: nn.Sequential, balance: list[int], schedule: str, chunks: int, mode: str) -> Any:
    pipe = GPipe(
        layers,
        balance,
        devices=["cpu"] * len(balance),
        chunks=chunks,
        checkpoint=mode,
        schedule=schedule,
        backend="aten",
    )
    pipe.threads_per_stage = 1
    return pipe


def _sleeping() -> list[list[Any]]:
    """Returns a row for each schedule: its bubble by the formula, by its actions, and as measured."""
    _define_nap()
    rows = []
    for name, (num_stages, num_ranks, formula, ticks) in CASES.items():
        pipe = _pipe(
            nn.Sequential(*(Sleeper() for _ in range(num_stages))),
            [1] * num_stages,
            name,
            MICROBATCHES,
            "never",
        )
        x = torch.zeros(MICROBATCHES, 4, requires_grad=True)

        def step(pipe: Any = pipe, x: Tensor = x) -> float:
            begin = time.perf_counter()
            pipe.step(x, loss_fn=Tensor.sum, normalizer=1)
            return time.perf_counter() - begin

        step()
        seconds = sorted(step() for _ in range(5))[2]
        schedule = SCHEDULES[name](num_stages, MICROBATCHES, recomputed=())
        work = 3 * MICROBATCHES * num_stages / num_ranks
        expected = ticks(MICROBATCHES, num_stages)
        assert schedule.critical_path(_duration) == expected
        found = seconds / NAP
        rows.append(
            [name, f"{num_stages} on {num_ranks}", formula, expected, found, found / expected]
            + [f"{1 - work / each:.3f}" for each in (expected, found)]
        )
    return rows


def _duration(action: Action) -> float:
    return {Kind.F: 1.0, Kind.I: 1.0, Kind.W: 1.0, Kind.B: 2.0}.get(action.kind, 0.0)


def _computing() -> list[list[Any]]:
    """Returns a row for each mode and schedule: the time of a step of GPT blocks in two stages."""
    rows = []
    x = torch.randn(BATCH * MICROBATCHES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    for mode in ("never", "always"):
        steps = {}
        for name in SCHEDULES:
            torch.manual_seed(0)
            num_stages = 4 if name == "interleaved" else 2
            layers = nn.Sequential(*blocks(COUNT, WIDTH))
            pipe = _pipe(layers, [COUNT // num_stages] * num_stages, name, MICROBATCHES, mode)
            steps[name] = lambda pipe=pipe: pipe.step(x, target=x, loss_fn=F.mse_loss)
        found = samples(steps, ROUNDS)
        for name, own in found.items():
            rows.append([mode, name, timing(own).ms(), str(Ratio.of(own, found["gpipe"]))])
    return rows


def _updating() -> list[list[Any]]:
    """Returns a row for each optimizer: the time of a step without it, with it at the end, in the drain."""
    rows = []
    x = torch.randn(BATCH * MICROBATCHES, UPDATE_LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(0)
        layers = nn.Sequential(*blocks(COUNT, WIDTH))
        pipe = _pipe(layers, [COUNT // 2] * 2, "gpipe", MICROBATCHES, "except_last")
        optimizer = make(pipe.parameters())

        def step(pipe: Any = pipe, **options: Any) -> None:
            pipe.step(x, target=x, loss_fn=F.mse_loss, **options)

        steps: dict[str, Callable[[], None]] = {"without": step}
        for place in ("end", "drain"):
            steps[place] = functools.partial(step, optimizer=optimizer, optimizer_in=place)
        found = samples(steps, 4 * ROUNDS)
        without, *updated = (timing(own) for own in found.values())
        end, drain = (each.median - without.median for each in updated)
        rows.append([name, *(timing(own).ms() for own in found.values()), 1 - drain / end])
    return rows


def main() -> None:
    updates = Table(
        "The optimizer in the drain",
        ["optimizer", "ms without [20%, 80%]", "optimizer_in='end'", "optimizer_in='drain'", "hidden"],
        _updating(),
        f"The same blocks and stages under gpipe and 'except_last', {BATCH * MICROBATCHES} x {UPDATE_LENGTH} "
        f"tokens, by turns, medians of {4 * ROUNDS} rounds. Hidden: the share of the optimizer's time at the "
        "end that a step takes less in the drain.\n",
    )
    blocks_of_gpt = Table(
        "Steps of GPT blocks",
        ["checkpoint", "schedule", "ms per step [20%, 80%]", "relative to gpipe"],
        _computing(),
        f"{COUNT} GPT blocks of width {WIDTH}; {BATCH * MICROBATCHES} x {LENGTH} tokens in {MICROBATCHES} "
        "micro-batches, two stages with one thread each ('interleaved': four, on two ranks), by turns, "
        f"medians of {ROUNDS} rounds.\n",
    )
    report(
        globals(),
        "schedule | stages | ticks of a step | formula | measured | ratio | bubble | measured bubble",
        _sleeping(),
        [blocks_of_gpt, updates],
        nap_ms=NAP * 1000.0,
    )
