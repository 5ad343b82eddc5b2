"""Updates of a step: which arguments are refused, and the order of a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpipe_fast.training.update import StageUpdates, checked_update


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    for parameter in layers.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    return layers


def sgd(layers: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(layers.parameters(), lr=0.5)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"optimizer": torch.optim.SGD}, TypeError, "optimizer"),
        ({"optimizer": sgd(model())}, ValueError, "optimizer"),
        ({"scaler": 2.0}, TypeError, r"scaler must be a torch\.amp\.GradScaler, got float"),
        ({"optimizer": None, "max_norm": 1.0}, ValueError, "max_norm"),
        ({"max_norm": -1.0}, ValueError, "max_norm"),
        ({"max_norm": float("nan")}, ValueError, "max_norm"),
        ({"max_norm": "1"}, TypeError, "max_norm"),
        ({"optimizer_in": "begin"}, ValueError, "optimizer_in must be 'end' or 'drain', got 'begin'"),
        ({"optimizer_in": "drain", "optimizer": None}, ValueError, "optimizer"),
    ],
)
def test_arguments_are_checked_before_any_work(changed: dict[str, Any], kind: type, message: str) -> None:
    layers = model()
    arguments = {"optimizer": sgd(layers), "scaler": None, "max_norm": None}
    checked_update(layers, **arguments)
    with pytest.raises(kind, match=message):
        checked_update(layers, **arguments | changed)


def test_gradients_are_needed() -> None:
    layers = model()
    with torch.no_grad(), pytest.raises(RuntimeError, match="step computes gradients, which are disabled"):
        checked_update(layers, sgd(layers), None, None)


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
