"""A layer is Python code that makes the calls of a part."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.from_model.cut import cut
from gpipe_fast.from_model.layer import GlueLayer, OwnedTensors, make_layer
from tests.unit.from_model.recording import Calls, record_of

X = torch.randn(4, 3)


class Pair(NamedTuple):
    """A named tuple as an argument of a module."""

    first: Any
    second: Any


class Takes(nn.Module):
    """A module that gets nested arguments."""

    def forward(self, pair: Any, table: Any, *, number: float, flags: Any) -> Any:
        return {"sum": pair[0] + table["x"][0] * number, "none": None, "pair": Pair(pair[1], flags[0])}


def layer_of(function: Callable[[Tensor], Any], *modules: nn.Module) -> tuple[GlueLayer, OwnedTensors]:
    """Returns the last layer of a model that calls a function after its only block."""
    block = nn.Identity()
    flow = record_of(Calls(lambda x: function(block(x)), [block, *modules]), X, blocks=[block])
    return make_layer(flow, cut(flow, [block], list(flow.result.refs()))[-1])


def check(function: Callable[[Tensor], Any], *modules: nn.Module) -> str:
    """Asserts that the layer computes what the function does; returns its code."""
    layer, _ = layer_of(function, *modules)
    (found,) = layer((X,))
    assert torch.equal(found, function(X))
    return layer.source


BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow"]


@pytest.mark.parametrize("name", BINARY)
def test_operators_of_tensors_and_numbers(name: str) -> None:
    function = getattr(operator, name)
    check(lambda x: function(x.abs(), x.abs() + 1))
    check(lambda x: function(x.abs(), 2.5))
    check(lambda x: function(2.5, x.abs() + 1))


def test_attributes_methods_and_functions() -> None:
    check(lambda x: x @ x.T)
    check(lambda x: F.softmax(x.T.contiguous(), dim=-1)[..., 1:, None].squeeze(-1).mT)
    check(lambda x: torch.stack(torch.split(x, [1, 2], dim=1)[:1]).flatten(1)[:, : x.shape[1]])
    check(lambda x: torch.where(x > 0, x, float("-inf")))


def test_nested_arguments_and_results_of_modules() -> None:
    takes = Takes()

    def forward(x: Tensor) -> Tensor:
        found = takes(Pair(x, x * 2), {"x": [x, 3]}, number=0.5, flags=(x.abs(), True))
        return found["sum"] + found["pair"].first + found["pair"].second

    source = check(forward, takes)
    assert "self.m0(" in source


def test_modes_around_calls_are_written() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2
        with torch.autocast("cpu", torch.bfloat16):
            return (y @ x.T).float()

    source = check(forward)
    assert "with torch.no_grad():" in source
    assert "with torch.autocast(device.type, dtype=" in source


def test_layers_with_equal_code_share_a_class() -> None:
    def layer(scale: float) -> GlueLayer:
        return layer_of(lambda x: x * scale)[0]

    assert type(layer(2.0)) is type(layer(2.0))
    assert type(layer(2.0)) is not type(layer(3.0))
    # Functions are compared by identity, so that a class never calls another function than its own.
    assert type(layer_of(F.silu)[0]) is not type(layer_of(F.gelu)[0])


def test_a_layer_reads_the_tensors_that_the_model_has_now() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.register_buffer("shift", torch.zeros(3))
            self.plain = torch.ones(3)
            self.block = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x) * self.scale + self.shift - self.plain

    model: Any = Scales()
    flow = record_of(model, X, blocks=[model.block])
    layer, owned = make_layer(flow, cut(flow, [model.block], list(flow.result.refs()))[-1])
    assert [name for name, _ in layer.named_parameters()] == ["p0"]
    model.scale = nn.Parameter(torch.full((3,), 2.0))
    model.shift = torch.ones(3)
    model.plain = torch.zeros(3)
    owned.take()
    assert layer.p0 is model.scale
    assert torch.equal(*layer((X,)), model(X))
    moved = layer.p0.detach().clone()
    layer.register_parameter("p0", nn.Parameter(moved))
    owned.give_back()
    assert model.scale is layer.p0
