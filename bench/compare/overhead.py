"""Overhead of a step beyond its operators: the stages are so small that little else remains.

{STAGES} stages of 2 x (Linear({WIDTH}, {WIDTH}), ReLU), {CHUNKS} micro-batches, batch {BATCH}; forward and
backward from a given output gradient, starting without gradients. All candidates run alternately in one
process under OMP_NUM_THREADS=1; medians of {ROUNDS} samples of {CALLS} steps. 'Ours' is gpipe_fast with K =
{STAGES} and the same checkpoint mode; the checkpointed loop is compared with 'always', other candidates
without a mode with 'never'. Gradients are compared with the plain loop's: ours must be equal, others may
differ by {TOLERANCE:.0e} of the largest element of their tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from bench import process
from bench.comparison import Comparison, Opened, Outcome, gradients
from bench.measure import report
from bench.models.mlp import mlp
from bench.peers import Step, checkpointed, has_torchgpipe, looped
from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES

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


def comparison(found: Mapping[str, Step]) -> Comparison:
    """Returns the comparison of steps, of which one is the plain loop."""

    def opened(stack: ExitStack) -> Opened:
        found[LOOP]()
        return found, [gradient.clone() for gradient in found[LOOP].gradients()]

    return Comparison("overhead", list(found), opened, ROUNDS, CALLS)


def rows(outcomes: Mapping[str, Outcome]) -> list[list[object]]:
    """Returns one row per candidate; one whose gradients are wrong gets neither a time nor a ratio."""
    loop = outcomes[LOOP]
    return [
        [name, each.ms(), each.over(outcomes[_comparable_name(name)]), loop.over(each), gradients(name, each)]
        for name, each in outcomes.items()
    ]


def _comparable_name(name: str) -> str:
    """Returns which of our candidates this one is compared with: the one of its checkpoint mode."""
    mode = name.rpartition(", ")[2]
    instead = "always" if name == CHECKPOINTED else "never"
    return f"gpipe_fast, K = {STAGES}, {mode if mode in CHECKPOINT_MODES else instead}"


def write() -> None:
    """Measures in this process, whose threads must have one OpenMP thread each."""
    headers = ["candidate", "ms: median [p20, p80]", "time / ours", "plain loop / time", "gradients"]
    report(globals(), headers, rows(comparison(candidates()).measure()))


def main() -> None:
    # torchgpipe starts threads in every step; only the environment can limit their OpenMP threads.
    process.call("bench.compare.overhead:write")
