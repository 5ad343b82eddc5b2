"""Draws do not depend on the checkpoint setting, and a recompute repeats them (contract 2)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.reference import SEED, loop_step, pipeline_step, unequal
from tests.untraceable import WIDTH, M, features, model, without_warnings

pytestmark = pytest.mark.usefixtures("one_thread")


def test_dropout_draws_the_same_under_every_share_pytorch_190758() -> None:
    """In pytorch#190758, a budget of memory makes a recomputed dropout draw another mask than its forward.

    With a weight of ones, the gradient of the input is the mask, which the output shows too.
    """

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout((x * 1.5).tanh(), 0.5) + x.detach()

    x = torch.randn(8, 50, generator=torch.Generator().manual_seed(SEED))
    found = []
    for choice in (0.0, 0.25, 0.5, 0.75, 1.0, "except_last"):
        pipe = GPipe(nn.Sequential(Masked(), Masked(), Masked()), [2, 1], chunks=M, checkpoint=choice)
        leaf = x.clone().requires_grad_()
        torch.manual_seed(SEED)
        output = pipe(leaf)
        output.sum().backward()
        assert leaf.grad is not None
        found.append((output.detach(), leaf.grad))
    for output, gradient in found:
        assert torch.equal(output, found[0][0])
        assert torch.equal(gradient, found[0][1])


def test_a_recompute_draws_the_same_numbers_from_a_layers_own_generator() -> None:
    class DrawsFromOwnGenerator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.generator = nn.Linear(WIDTH, WIDTH), torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * torch.randn(x.shape, generator=self.generator))

    drawing_layer = DrawsFromOwnGenerator()
    layers = model(drawing_layer)

    def step(run: Callable[[], dict[str, Tensor | None]]) -> dict[str, Tensor | None]:
        drawing_layer.generator.manual_seed(5)
        result = run()
        return {**result, "next": torch.randn(3, generator=drawing_layer.generator)}

    expected = step(lambda: loop_step(layers, features(), M))
    for checkpoint in CHECKPOINT_MODES:
        pipe = GPipe(layers, [2, 5], chunks=M, checkpoint=checkpoint)
        with without_warnings():
            assert unequal(step(lambda pipe=pipe: pipeline_step(pipe, features())), expected) == []  # type: ignore[misc]
