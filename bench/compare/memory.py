"""Peak memory of training steps, compared with a plain loop under the same checkpoint policy.

Resident memory of the process in MiB. {CHUNKS} micro-batches, checkpoint='except_last', two stages on the CPU
with one thread each. The plain loop has one thread and the same policy: each partition of each micro-batch
but the last is a region of `torch.utils.checkpoint`. Each candidate runs in a process of its own; both import
the same modules. The kernel counts the peak; the first step's and later ones' are separate.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import process, resident
from bench.measure import report
from bench.peers import checkpointed
from examples.gpt.__main__ import gpt
from gpipe_fast import GPipe

CHUNKS = 4
KINDS = ("plain", "gpipe_fast")


@dataclass(frozen=True)
class Case:
    """A model and the mini-batches on which it is trained.

    Attributes:
        title: the title of its rows.
        make: makes the model.
        balance: the number of layers of each of two stages.
        vocabulary: the number of different tokens.
        batch: sequences in each mini-batch.
        lengths: the length of the sequences, by step.
        adamw: whether AdamW updates the parameters after each step.
    """

    title: str
    make: Callable[[], nn.Sequential]
    balance: tuple[int, int]
    vocabulary: int
    batch: int
    lengths: Sequence[int]
    adamw: bool = False


def _gpt2() -> nn.Sequential:
    transformers = importlib.import_module("transformers")
    example: Any = importlib.import_module("examples.transformers_gpt2.__main__")
    config = transformers.GPT2Config(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
    layers: nn.Sequential = example.gpt2_layers(transformers.GPT2LMHeadModel(config))
    return layers


def _small() -> nn.Sequential:
    return gpt(64, layers=12, heads=4, length=512)


def _distinct_lengths() -> list[int]:
    order = torch.randperm(512, generator=torch.Generator().manual_seed(0))
    return [int(length) + 1 for length in order[:100]]


CASES = {
    "gpt2": Case("GPT-2 small, 4 x 128 tokens, AdamW", _gpt2, (7, 7), 50257, 4, [128] * 4, adamw=True),
    "lengths": Case(
        "12 blocks of width 64, 100 lengths up to 512", _small, (7, 7), 256, 8, _distinct_lengths()
    ),
}


def checkpointed_loop(layers: nn.Sequential, balance: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    """Returns the plain loop over micro-batches; each partition is checkpointed except in the last one."""
    recomputing = checkpointed([layers[: balance[0]], layers[balance[0] :]])

    def run(tokens: Tensor) -> Tensor:
        *first, last = tokens.chunk(CHUNKS)
        return torch.cat([*map(recomputing, first), layers(last)])

    return run


def measured(name: str, kind: str) -> dict[str, float]:
    """Measures a case by its name."""
    return measure(CASES[name], kind)


def measure(case: Case, kind: str) -> dict[str, float]:
    """Trains in this process, and returns its resident memory (MiB) at several times, and peaks between."""
    found = {"imported": resident.present()}
    torch.manual_seed(0)
    layers = case.make()
    forward = checkpointed_loop(layers, case.balance)
    if kind == "gpipe_fast":
        pipe = GPipe(layers, list(case.balance), devices=["cpu"] * 2, chunks=CHUNKS, backend="aten")
        pipe.threads_per_stage = 1
        forward = pipe
    optimizer = torch.optim.AdamW(layers.parameters()) if case.adamw else None
    generator = torch.Generator().manual_seed(0)
    found["built"] = resident.present()
    for step, length in enumerate(case.lengths):
        if step < 2:
            resident.reset_peak()
        text = torch.randint(case.vocabulary, (case.batch, length + 1), generator=generator)
        layers.zero_grad()
        F.cross_entropy(forward(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        if optimizer is not None:
            optimizer.step()
        if step == 0:
            found |= {"first step, peak": resident.peak(), "first step, after": resident.present()}
    return found | {"later steps, peak": resident.peak(), "later steps, after": resident.present()}


def main() -> None:
    rows: list[list[object]] = []
    for name, case in CASES.items():
        by_kind = {kind: process.call("bench.compare.memory:measured", name, kind) for kind in KINDS}
        plain = by_kind["plain"]
        for kind, found in by_kind.items():
            peaks = [max(each["first step, peak"], each["later steps, peak"]) for each in (found, plain)]
            rows.append([case.title, kind, *(round(value) for value in found.values()), peaks[0] / peaks[1]])
    report(globals(), ["case", "candidate", *plain, "peak, relative to plain"], rows)
