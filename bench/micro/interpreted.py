"""The cost of one layer that cannot be traced: alone in Python, or with all layers in Python.

Milliseconds of forward and backward, {CHUNKS} micro-batches, medians [p20, p80]; the candidates alternate.
The layer checks whether its input is finite. All candidates have one intra-op thread; each of our stages has
its own core as far as cores are available. Our gradients are bitwise equal to the plain loop's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from bench.measure import alternate, report
from bench.models.gpt import blocks
from bench.models.mlp import mlp
from bench.peers import Step, looped, relative_difference
from gpipe_fast import GPipe

CHUNKS = 8
LOOP = "plain loop"


class FiniteCheck(nn.Module):
    """A layer with data-dependent control flow: passes on its input if all elements are finite."""

    def forward(self, x: Tensor) -> Tensor:
        return x if bool(x.detach().abs().sum() < torch.inf) else torch.nan_to_num(x)


def candidates(layers: Sequence[nn.Module], balance: Sequence[int], x: Tensor, mode: str) -> dict[str, Step]:
    """Returns the candidates; the untraceable layer is in the middle of the second stage, absent in one."""
    import torchgpipe

    first, second, *rest = balance
    position = first + second // 2
    gradient = torch.randn(x.shape)

    def model(check: bool = True) -> nn.Sequential:
        copied = list(deepcopy(nn.ModuleList(layers)))
        return nn.Sequential(*copied[:position], *([FiniteCheck()] if check else []), *copied[position:])

    def step(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Step:
        return Step(module.parameters(), forward, x, gradient)

    def ours(backend: str, check: bool = True) -> Step:
        sizes = [first, second + check, *rest]
        devices = ["cpu"] * len(sizes)
        pipe = GPipe(model(check), sizes, devices=devices, chunks=CHUNKS, checkpoint=mode, backend=backend)
        pipe.threads_per_stage = 1
        return step(pipe, pipe)

    plain, peer = (
        model(),
        torchgpipe.GPipe(
            model(),
            [first, second + 1, *rest],
            devices=["cpu"] * len(balance),
            chunks=CHUNKS,
            checkpoint=mode,
        ),
    )
    found = {
        LOOP: step(plain, looped(plain, CHUNKS)),
        "without the layer, all lowered": ours("aten", check=False),
        "the layer in Python, the others lowered": ours("auto"),
        "all in Python": ours("eager"),
        "torchgpipe": step(peer, peer),
    }
    for _ in range(4):  # until plans are made and caches are warm
        for each in found.values():
            each()
    return found


def row(what: str, steps: dict[str, Step], rounds: int, calls: int) -> list[object]:
    """Returns a row: the median time in ms of each candidate."""
    expected = steps[LOOP].gradients()
    for name, step in steps.items():
        if name != "torchgpipe":
            assert relative_difference(step.gradients(), expected) == 0, f"gradients of {name}"
    timings = alternate(steps, rounds, calls)
    return [what, *(timing.ms() for timing in timings.values())]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tiny = [layer for _ in range(4) for layer in mlp()]
    gpt = blocks(8, width=128)
    rows = []
    for mode in ("never", "always"):
        steps = candidates(tiny, [4, 4, 4, 4], torch.randn(64, 64), mode)
        rows.append(row(f"4 stages of 2 x (Linear(64, 64), ReLU), {mode}", steps, rounds=40, calls=10))
    for mode in ("never", "always"):
        steps = candidates(gpt, [4, 4], torch.randn(8, 128, 128), mode)
        rows.append(row(f"2 stages of 4 GPT blocks of width 128, {mode}", steps, rounds=20, calls=1))
    report(globals(), ["step", *steps], rows)
