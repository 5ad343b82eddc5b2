"""Losses for tests of `verify`: one for any output, and one that differs from call to call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[Tensor], object]


def squared_loss(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    outputs = output if isinstance(output, tuple) else (output,)
    return torch.stack([o.abs().float().square().mean() for o in outputs]).sum()


class Alternating:
    """Calls the losses in turn: the first for the pipeline, the second for the plain loop."""

    def __init__(self, *losses: Loss) -> None:
        self.losses = list(losses)

    def __call__(self, output: Tensor) -> Tensor:
        loss = self.losses.pop(0)(output)
        return loss  # type: ignore[return-value]
