"""Models that are made to pipelines, and those that are refused before they are recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe

X = torch.ones(4, 3)


class Net(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def pipelined(model: Any, args: Any = (X,), **options: Any) -> Any:
    return GPipe.from_model(model, args, **{"devices": ["cpu"] * 2, "chunks": 2, **options})


@pytest.mark.parametrize("name", ["gradient_checkpointing_disable", "disable_gradient_checkpointing"])
def test_gradient_checkpointing_becomes_a_mode(name: str) -> None:
    """As of models of transformers, and of diffusers."""

    def disable(model: Any) -> None:
        model.gradient_checkpointing = False

    model = type("Checkpointed", (Net,), {name: disable})()
    model.gradient_checkpointing = True
    with pytest.warns(UserWarning, match="gradient checkpointing becomes checkpoint='always'"):
        found = pipelined(model)
    assert found.checkpoint == "always"
    assert not model.gradient_checkpointing


@pytest.mark.parametrize(
    ("model", "args", "kind", "message"),
    [
        (lambda x: x, (X,), TypeError, "model must be an nn.Module, got function"),
        (Net(), X, TypeError, r"args must be a tuple of positional arguments, got Tensor; pass \(x,\)"),
        (Net(), (), ValueError, "from_model records a call of the model; pass its arguments"),
    ],
)
def test_models_and_arguments_that_are_refused(model: Any, args: Any, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        pipelined(model, args)
