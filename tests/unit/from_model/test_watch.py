"""A key of what forwards may read: it changes if, and only if, one of these changes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast.from_model.watch import attributes_of


class Inner(nn.Module):
    """A block."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Net(nn.Module):
    """Has attributes of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Inner()
        self.weight = nn.Parameter(torch.ones(2))
        self.number, self.name, self.options = 1, "x", {"a": [1, 2], "b": {3}}
        self.config = SimpleNamespace(rate=0.1, inner=SimpleNamespace(kind="y"))
        self.function: Callable[..., Any] = torch.sin

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * min(3, self.number)


CHANGES: dict[str, Callable[[Any], object]] = {
    "number": lambda net: setattr(net, "number", 2),
    "type of a number": lambda net: setattr(net, "number", 1.0),
    "inside of a list": lambda net: net.options["a"].append(3),
    "inside of a set": lambda net: net.options["b"].add(4),
    "nested configuration": lambda net: setattr(net.config.inner, "kind", "z"),
    "function": lambda net: setattr(net, "function", torch.cos),
    "new attribute": lambda net: setattr(net, "other", None),
    "module": lambda net: setattr(net, "block", Inner()),
    "mode of a child": lambda net: net.block.eval(),
    "mode": lambda net: setattr(net, "training", False),
    "hook": lambda net: net.register_forward_hook(print),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_changes_the_key(name: str) -> None:
    net = Net()
    before = attributes_of([net])
    assert attributes_of([net]) == before
    assert hash(attributes_of([net])) == hash(before)
    CHANGES[name](net)
    assert attributes_of([net]) != before


def test_elements_of_tensors_are_not_compared() -> None:
    net = Net()
    before = attributes_of([net])
    with torch.no_grad():
        net.weight.add_(1)
    assert attributes_of([net]) == before


def test_objects_that_contain_themselves_are_walked_once() -> None:
    net = Net()
    net.config.again = net.config
    net.options["self"] = net.options
    before = attributes_of([net])
    net.config.rate = 0.3
    assert attributes_of([net]) != before
