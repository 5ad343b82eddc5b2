"""Single values of a record are computed from its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.from_model.evaluate import Unknown, computes
from tests.unit.from_model.recording import Calls, record_of

X = torch.randn(4, 3)


def value_of(function: Callable[..., Any], *modules: nn.Module) -> Any:
    flow = record_of(Calls(function, modules), X)
    (found,) = computes(flow, [0], list(flow.result.refs()))([X])
    return found


def test_changes_in_place_before_and_after_an_alias_are_made() -> None:
    def forward(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        row = y[0]
        row += 1
        y[1] = x[1]
        return y.sum(1)

    assert torch.equal(value_of(forward), forward(X))


def test_modules_are_unknown_and_so_are_random_numbers() -> None:
    linear = nn.Linear(3, 3)
    with pytest.raises(Unknown, match="a Linear, called at"):
        value_of(lambda x: linear(x) + 1, linear)
    with pytest.raises(Unknown, match="random numbers, drawn at"):
        value_of(lambda x: F.dropout(x, 0.5))
