"""The function that a trace runs: its skip tensors, and outputs that cannot be passed on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast.trace.function import TraceContext, skips_from
from gpipe_fast.trace.trace import trace
from gpipe_fast.trace.traceability import Untraceable


def test_skip_connections_without_a_tensor_are_none() -> None:
    keys: Any = ("first", "second", "third")
    x, y = torch.ones(1), torch.ones(2)
    found = skips_from(TraceContext(pops=keys, popped=(True, False, True)), [x, y])
    assert found == {"first": x, "second": None, "third": y}
    assert skips_from(TraceContext(), []) == {}


def test_contexts_keep_their_captures_apart() -> None:
    layer = nn.Linear(2, 2)
    first, second = TraceContext().find_state, TraceContext().find_state
    assert first(layer, "description") is first(layer, "description")
    assert first(layer, "description") is not second(layer, "description")


class Returns(nn.Module):
    """Returns an object that is no tensor."""

    def forward(self, x: Tensor) -> Any:
        return {"x": x, "set": frozenset({1})}


def test_outputs_that_cannot_be_passed_on_are_named() -> None:
    found = trace([nn.Linear(2, 2), Returns()], [torch.ones(3, 2)])
    assert isinstance(found, Untraceable)
    assert "cannot be passed on: expected Tensor, but got frozenset" in found.reason
