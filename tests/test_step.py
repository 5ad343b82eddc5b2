"""The autograd node of a mini-batch: sums, second backwards, changes in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference import leaf, plain_loop, restored
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES

pytestmark = pytest.mark.usefixtures("one_thread")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def features(batch: int = 8) -> Tensor:
    return torch.randn(batch, 6, generator=torch.Generator().manual_seed(1))


def test_two_mini_batches_add_up() -> None:
    model, xs = mlp(), (features(8), features(8) * 2)
    pipe = GPipe(model, [2, 3], chunks=4)
    for forward in (lambda x: plain_loop(model, x, 4), pipe):
        for x in xs:
            forward(x).square().sum().backward()
        gradients = [p.grad for p in model.parameters()]
        if forward is not pipe:
            expected, _ = gradients, model.zero_grad()
    for ours, theirs in zip(gradients, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_two_mini_batches_may_be_under_way(checkpoint: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    pipe = GPipe(model, [1, 2], chunks=2, checkpoint=checkpoint)

    def step(forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with restored(model):
            first, second = forward(features()), forward(features() * 2)
            first.sum().backward()
            second.square().sum().backward()
            return [p.grad for p in model.parameters()] + [b.clone() for b in model.buffers()]

    for ours, expected in zip(step(pipe), step(lambda x: plain_loop(model, x, 2)), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_second_backward_needs_retain_graph(checkpoint: str) -> None:
    pipe = GPipe(mlp(), [2, 3], chunks=4, checkpoint=checkpoint)
    loss = pipe(features()).sum()
    first = torch.autograd.grad(loss, list(pipe.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(pipe.parameters()))
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_autograd_grad_of_parameters_and_input() -> None:
    model, x = mlp(), leaf(features())
    pipe = GPipe(model, [2, 3], chunks=4)
    wanted = [x, model[2].weight]
    ours = torch.autograd.grad(pipe(x).sum(), wanted)
    expected = torch.autograd.grad(plain_loop(model, x, 4).sum(), wanted)
    assert all(map(torch.equal, ours, expected))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("changed", ["parameter", "input"])
def test_an_in_place_change_before_the_backward_raises(changed: str) -> None:
    pipe, x = GPipe(mlp(), [2, 3], chunks=2), features()
    loss = pipe(x).sum()
    with torch.no_grad():
        (x if changed == "input" else pipe[0].weight).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert all(p.grad is None for p in pipe.parameters())


def test_the_backward_cannot_be_differentiated() -> None:
    """A gradient penalty would otherwise silently be left out."""
    pipe, x = GPipe(mlp(), [2, 3], chunks=2), leaf(features())
    loss = pipe(x).sum()
    with pytest.raises(RuntimeError, match="backward cannot be differentiated"):
        torch.autograd.grad(loss, x, create_graph=True)
