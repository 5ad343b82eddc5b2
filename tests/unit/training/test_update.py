"""Updates of a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from gpipe_fast.training.update import _unscale


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    for parameter in layers.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    return layers


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
