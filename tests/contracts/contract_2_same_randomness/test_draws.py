"""Draws do not depend on the checkpoint setting, and a recompute repeats them (contract 2)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.reference import SEED
from tests.untraceable import M

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
