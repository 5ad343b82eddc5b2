"""The cost of one layer that cannot be traced: alone in Python, or with all layers in Python.

Forward and backward, {CHUNKS} micro-batches; the candidates alternate. The layer checks whether its input is
finite. All candidates have one intra-op thread; each of our stages has its own core as far as cores are
available. Gradients are compared with the plain loop's; the candidate without the layer has the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.comparison import Comparison, Opened, report_comparisons
from bench.models.gpt import blocks
from bench.models.mlp import mlp
from bench.peers import Step, has_torchgpipe, looped
from gpipe_fast import GPipe

CHUNKS = 8
LOOP, TORCHGPIPE = "plain loop", "torchgpipe"
OURS = "gpipe_fast, the layer in Python, the others lowered"
WITHOUT, EAGER = "gpipe_fast, without the layer, all lowered", "gpipe_fast, all in Python"
NAMES = [OURS, LOOP, WITHOUT, EAGER, *([TORCHGPIPE] if has_torchgpipe() else [])]


class FiniteCheck(nn.Module):
    """A layer with data-dependent control flow: passes on its input if all elements are finite."""

    def forward(self, x: Tensor) -> Tensor:
        return x if bool(x.detach().abs().sum() < torch.inf) else torch.nan_to_num(x)


def candidates(layers: Sequence[nn.Module], balance: Sequence[int], x: Tensor, mode: str) -> dict[str, Step]:
    """Returns the candidates; the untraceable layer is in the middle of the second stage, absent in one."""
    first, second, *rest = balance
    position = first + second // 2
    gradient = torch.randn(x.shape)

    def step(name: str) -> Step:
        check = name != WITHOUT
        copied = list(deepcopy(nn.ModuleList(layers)))
        model = nn.Sequential(*copied[:position], *([FiniteCheck()] if check else []), *copied[position:])
        sizes = [first, second + check, *rest]
        options: dict[str, Any] = {"devices": ["cpu"] * len(sizes), "chunks": CHUNKS, "checkpoint": mode}
        forward: Callable[[Tensor], Tensor] = looped(model, CHUNKS)
        if name == TORCHGPIPE:
            import torchgpipe

            forward = torchgpipe.GPipe(model, sizes, **options)
        elif name != LOOP:
            backend = {OURS: "auto", WITHOUT: "aten", EAGER: "eager"}[name]
            pipe = GPipe(model, sizes, backend=backend, **options)
            pipe.threads_per_stage = 1
            forward = pipe
        return Step(model.parameters(), forward, x, gradient)

    found = {name: step(name) for name in NAMES}
    for _ in range(4):  # until plans are made and caches are warm
        for each in found.values():
            each()
    return found


def _tiny(stack: ExitStack) -> Opened:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in mlp()]
    found = candidates(layers, [4, 4, 4, 4], torch.randn(64, 64), "never")
    return found, found[LOOP].gradients()


def _gpt(mode: str, stack: ExitStack) -> Opened:
    torch.manual_seed(0)
    found = candidates(blocks(8, width=128), [4, 4], torch.randn(8, 128, 128), mode)
    return found, found[LOOP].gradients()


COMPARISONS = [
    Comparison("4 stages of 2 x (Linear(64, 64), ReLU), never", NAMES, _tiny, calls=10),
    *(
        Comparison(f"2 stages of 4 GPT blocks of width 128, {mode}", NAMES, partial(_gpt, mode))
        for mode in ("never", "always")
    ),
]


def main() -> None:
    report_comparisons(globals())
