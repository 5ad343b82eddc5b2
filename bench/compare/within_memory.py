"""Steps of pipelines that were given a number of bytes, compared with balances by time at equal memory.

Forward and backward of {CHUNKS} micro-batches in {STAGES} stages with one thread each, from a given gradient
of the output. The first candidate has the balance of `balance_by_time`, and recomputes all micro-batches but
the last. What `GPipe.memory` predicts for it, with parameters and gradients, is what the second one is given
as `memory=`, which chooses the balance and the recomputation. The measured peak leaves out what is there
before the first step, so the parameters. Each has its own process; they alternate; medians of {rounds} steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from bench.comparison import compare, gradients
from bench.measure import PAUSE, Ratio, report
from bench.models.gpt import gpt
from bench.models.resnet import resnet
from bench.peers import ProcessCandidate, Step
from gpipe_fast import GPipe
from gpipe_fast.balance import balance_by_time

STAGES, CHUNKS, ROUNDS = 2, 8, 50
BY_TIME, WITHIN = "gpipe_fast, balance_by_time, except_last", "gpipe_fast, memory="


def widening() -> nn.Sequential:
    """Returns linear layers whose widths grow, so that the last ones have most parameters."""
    widths = [128, 128, 128, 256, 256, 512, 512, 1024, 128]
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(widths)))


@dataclass(frozen=True)
class Model:
    """A model with unequal layers.

    Attributes:
        name: its name.
        make: makes its layers.
        sample: makes a mini-batch.
    """

    name: str
    make: Callable[[], nn.Sequential]
    sample: Callable[[], Tensor]

    def pipe(self, balance: list[int] | None, settings: dict[str, object]) -> tuple[GPipe, Tensor]:
        """Returns a pipeline and a mini-batch, which are the same in every process."""
        torch.manual_seed(0)
        layers = self.make()
        pipe = GPipe(layers, balance, devices=["cpu"] * STAGES, chunks=CHUNKS, **settings)  # type: ignore[arg-type]
        pipe.threads_per_stage = 1
        return pipe, self.sample()


def tokens() -> Tensor:
    return torch.randint(4096, (2 * CHUNKS, 128), generator=torch.Generator().manual_seed(1))


def images() -> Tensor:
    return torch.randn(4 * CHUNKS, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def rows_of_features() -> Tensor:
    return torch.randn(256 * CHUNKS, 128, generator=torch.Generator().manual_seed(1))


MODELS = [
    Model("GPT, 6 blocks of width 128, a head of 4,096 tokens", partial(gpt, 6, 128, 4, vocab=4096), tokens),
    Model(
        "ResNet, 8 bottlenecks of width 32", partial(resnet, (2, 2, 2, 2), num_classes=10, width=32), images
    ),
    Model("8 linear layers of widths 128 to 1,024", widening, rows_of_features),
]


def make(number: int, model: Model, balance: list[int], settings: dict[str, object]) -> Step:
    """Builds a candidate in its process."""
    pipe, x = model.pipe(balance, settings)
    with torch.no_grad():
        shape = pipe(x).shape
    return Step(
        pipe.parameters(), pipe, x, torch.randn(shape, generator=torch.Generator().manual_seed(2)) / len(x)
    )


def chosen(model: Model) -> dict[str, tuple[list[int], dict[str, object], int]]:
    """Returns the balance, the other settings and the predicted bytes of each candidate."""
    torch.manual_seed(0)
    layers, x = model.make(), model.sample()
    balance = balance_by_time(STAGES, layers, x.chunk(CHUNKS)[0], timeout=2.0, device="cpu")
    settings: dict[str, object] = {"checkpoint": "except_last"}
    limit = _predicted(model, balance, settings)
    within: dict[str, object] = {"memory": limit}
    pipe, _ = model.pipe(None, within)
    pipe(x).sum().backward()  # chooses the balance
    found = list(pipe.balance)
    return {BY_TIME: (balance, settings, limit), WITHIN: (found, within, _predicted(model, found, within))}


def _predicted(model: Model, balance: list[int], settings: dict[str, object]) -> int:
    pipe, x = model.pipe(balance, settings)
    found = pipe.memory(x).totals["cpu"]
    assert found is not None, "a layer runs in Python"
    return found


def rows(model: Model, rounds: int) -> list[list[object]]:
    """Returns a row for each candidate; candidates alternate, each in its own process."""
    choices = chosen(model)
    with ExitStack() as stack:
        candidates = {}
        for name, (balance, settings, _) in choices.items():
            candidates[name] = ProcessCandidate(make, (model, balance, settings), threads=1)
            stack.callback(candidates[name].close)
        candidates[BY_TIME]()
        found = compare(candidates, candidates[BY_TIME].gradients(), rounds, pause=PAUSE)
    by_time = found[BY_TIME].times
    return [
        [
            model.name,
            name,
            " + ".join(map(str, balance)),
            predicted / 2**20,
            found[name].peak(),
            found[name].ms(),
            "" if name == BY_TIME else str(Ratio.of(by_time, found[name].times)),
            "" if name == BY_TIME else gradients(name, found[name]),
        ]
        for name, (balance, _, predicted) in choices.items()
    ]


def main(models: Sequence[Model] = MODELS, rounds: int = ROUNDS) -> None:
    torch.set_num_threads(1)
    report(
        globals(),
        "model | settings | balance | predicted, MiB | measured peak of a step, MiB | ms:"
        " median [p20, p80] | time by time / within: median of pairs [95% interval] | "
        "gradients",
        [row for model in models for row in rows(model, rounds)],
        rounds=rounds,
    )
