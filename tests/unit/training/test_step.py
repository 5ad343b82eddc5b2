"""`step` and `evaluate`: the loss of a mini-batch, its gradients, and what they return besides."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.models import features

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*stages idle")]


def model() -> tuple[GPipe, nn.Sequential]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    return GPipe(layers, [2, 1], chunks=3), layers


def batch() -> tuple[Tensor, Tensor]:
    """Returns eight samples, micro-batches of 3, 3 and 2; two targets do not count."""
    return features().double(), torch.tensor([0, 1, -100, 3, 2, -100, 1, 0])


def test_a_step_has_the_loss_the_gradients_and_the_update_of_the_whole() -> None:
    pipe, layers = model()
    x, y = batch()
    outputs = layers(x)
    expected = F.cross_entropy(outputs, y)
    gradients = torch.autograd.grad(expected, layers.parameters())
    evaluated = pipe.evaluate(x, target=y, loss_fn=F.cross_entropy)
    torch.testing.assert_close(evaluated, expected.detach())
    assert all(p.grad is None for p in pipe.parameters())
    before = [p.detach().clone() for p in pipe.parameters()]
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    losses: list[Tensor] = []
    loss, output = pipe.step(
        x, target=y, loss_fn=F.cross_entropy, losses=losses, optimizer=optimizer, return_outputs=True
    )
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(output, outputs.detach())
    assert not output.requires_grad
    assert len(losses) == 3
    for parameter, gradient, old in zip(pipe.parameters(), gradients, before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
        torch.testing.assert_close(parameter.detach(), old - 0.5 * gradient)
