"""`step` and `evaluate`: the loss of a mini-batch, its gradients, and what they return besides."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.runtime.plan import StepOrder
from gpipe_fast.training.step import Given
from tests.models import features

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*stages idle")]


def model() -> tuple[GPipe, nn.Sequential]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    return GPipe(layers, [2, 1], chunks=3), layers


def batch() -> tuple[Tensor, Tensor]:
    """Returns eight samples, micro-batches of 3, 3 and 2; two targets do not count."""
    return features().double(), torch.tensor([0, 1, -100, 3, 2, -100, 1, 0])


def test_a_step_has_the_loss_and_the_gradients_of_the_whole() -> None:
    pipe, layers = model()
    x, y = batch()
    expected = F.cross_entropy(layers(x), y)
    gradients = torch.autograd.grad(expected, layers.parameters())
    losses: list[Tensor] = []
    found = pipe.step(x, target=y, loss_fn=F.cross_entropy, losses=losses)
    torch.testing.assert_close(found, expected.detach())
    for parameter, gradient in zip(pipe.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert len(losses) == 3


def test_evaluate_computes_no_gradient() -> None:
    pipe, layers = model()
    x, y = batch()
    found = pipe.evaluate(x, target=y, loss_fn=F.cross_entropy)
    torch.testing.assert_close(found, F.cross_entropy(layers(x), y).detach())
    assert all(p.grad is None for p in pipe.parameters())


def test_outputs_are_returned_beside_the_loss() -> None:
    pipe, layers = model()
    x, y = batch()
    loss, output = pipe.step(x, target=y, loss_fn=F.cross_entropy, return_outputs=True)
    torch.testing.assert_close(output, layers(x).detach())
    assert not output.requires_grad
    assert loss.dim() == 0


def test_an_optimizer_updates_after_the_step() -> None:
    pipe, layers = model()
    x, y = batch()
    before = [p.detach().clone() for p in pipe.parameters()]
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    pipe.step(x, target=y, loss_fn=F.cross_entropy, optimizer=optimizer)
    for parameter, old in zip(layers.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.5 * parameter.grad)


def test_gradients_of_losses_are_divided_and_weighted() -> None:
    order = StepOrder("gpipe", ())
    like = torch.empty(1)
    plain = Given((), order, 4.0, None, 0).gradients(2, like)
    assert [[g.tolist() for g in each] for each in plain] == [[[0.25]], [[0.25]]]
    weighted = Given((), order, torch.tensor(4.0), [1.0, 2.0], 1).gradients(2, like)
    assert [[g.tolist() for g in each] for each in weighted] == [[[[0.25]]], [[[0.5]]]]
