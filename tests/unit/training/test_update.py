"""Updates of a step: which arguments are refused, and the order of a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from gpipe_fast.training.update import StageUpdates, _unscale


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    for parameter in layers.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    return layers


def sgd(layers: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(layers.parameters(), lr=0.5)


def test_stages_and_the_rest_are_updated_once() -> None:
    layers = model()
    parameters = list(layers.parameters())
    before = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5, momentum=0.9)
    updates = StageUpdates(optimizer)
    update = updates.of(parameters)
    update(1, [2])
    update(0, [0, 1])
    assert torch.equal(parameters[3].detach(), before[3])
    updates.finish()
    assert updates.stages == [1, 0]
    assert all(torch.equal(p.detach(), b - 1.0) for p, b in zip(parameters, before, strict=True))
    assert [id(p) for p in optimizer.state] == [id(p) for p in parameters]


def test_an_error_says_which_stages_are_updated() -> None:
    layers = model()
    updates = StageUpdates(sgd(layers))
    error = ValueError("failed")
    updates.explain(error)
    assert not hasattr(error, "__notes__")
    updates.of(list(layers.parameters()))(1, [2, 3])
    updates.explain(error)
    if hasattr(error, "add_note"):
        (note,) = error.__notes__
        assert "the parameters of stages [1] are updated already" in note


@pytest.mark.parametrize(
    ("fused", "unless_fused"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_gradients_are_unscaled_unless_the_optimizer_does_it(fused: bool, unless_fused: bool) -> None:
    layers, scaler = model(), GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5, fused=fused)
    assert _unscale(scaler, optimizer, unless_fused)
    expected = 2.0 if fused and unless_fused else 0.5
    assert all(torch.equal(p.grad, torch.full_like(p, expected)) for p in layers.parameters())
    layers[0].weight.grad[0, 0] = torch.inf
    scaler.update()
    assert not _unscale(scaler, optimizer, unless_fused)
