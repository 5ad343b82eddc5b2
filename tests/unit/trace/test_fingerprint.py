"""Fingerprints: they differ for layers that would trace differently, and only for those."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from gpipe_fast.trace.fingerprint import fingerprint


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    widths: list[int] = dataclasses.field(default_factory=lambda: [4, 4])


@dataclasses.dataclass(slots=True)
class SlottedConfig:
    scale: float = 1.0


class Layer(nn.Module):
    """Two linear layers and attributes of every supported type."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(4))
        self.sizes = [1, [2, 3]]
        self.options = {"eps": 1e-5, "nested": {"flag": True}}
        self.tags = {"a", "b"}
        self.config, self.slotted = Config(), SlottedConfig()
        self.mode = Mode.FAST
        self.function = torch.relu
        self.plain = torch.ones(2)


def no_op(*arguments: Any) -> None:
    pass


CHANGES: dict[str, Callable[[Layer], object]] = {
    "attribute of a child": lambda m: setattr(m.dropout, "p", 0.2),
    "attribute type": lambda m: setattr(m.dropout, "p", True),
    "nested list": lambda m: m.sizes[1].append(4),
    "nested dict": lambda m: m.options["nested"].update(flag=False),
    "set element": lambda m: m.tags.add("c"),
    "dataclass": lambda m: setattr(m.config, "scale", 2.0),
    "list in a dataclass": lambda m: m.config.widths.append(1),
    "dataclass with slots": lambda m: setattr(m.slotted, "scale", 2.0),
    "enum": lambda m: setattr(m, "mode", Mode.EXACT),
    "function": lambda m: setattr(m, "function", torch.tanh),
    "plain tensor replaced": lambda m: setattr(m, "plain", torch.ones(2)),
    "new attribute": lambda m: setattr(m, "extra", 1),
    "deleted attribute": lambda m: delattr(m, "mode"),
    "eval": lambda m: m.eval(),
    "eval of a child": lambda m: m.dropout.eval(),
    "dtype": lambda m: m.double(),
    "frozen parameter": lambda m: m.first.weight.requires_grad_(False),
    "tied parameters": lambda m: setattr(m.second, "weight", m.first.weight),
    "shape": lambda m: setattr(m, "first", nn.Linear(4, 5)),
    "strides": lambda m: setattr(m.first.weight, "data", m.first.weight.data.t()),
    "parameter removed": lambda m: setattr(m.first, "bias", None),
    "buffer dtype": lambda m: setattr(m, "scale", torch.ones(4, dtype=torch.float64)),
    "class of a child": lambda m: setattr(m, "dropout", nn.AlphaDropout(0.1)),
    "shared child": lambda m: setattr(m, "second", m.first),
    "forward hook": lambda m: m.first.register_forward_hook(no_op),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(no_op),
    "backward hook": lambda m: m.first.register_full_backward_hook(no_op),
    "parametrization": lambda m: weight_norm(m.first),
    "patched forward": lambda m: setattr(m, "forward", no_op),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_change_of_a_layer_changes_its_fingerprint(change: Callable[[Layer], object]) -> None:
    layer = Layer()
    before = fingerprint([layer])
    change(layer)
    after = fingerprint([layer])
    assert after != before
    assert after == fingerprint([layer])
    assert hash(after) == hash(fingerprint([layer]))


def test_a_fingerprint_ignores_tensor_values_and_gradients() -> None:
    layer = Layer()
    before = fingerprint([layer])
    with torch.no_grad():
        layer.first.weight.add_(1)
        layer.scale.mul_(2)
    layer.first.weight.grad = torch.ones(4, 4)
    assert fingerprint([layer]) == before


def test_layers_of_equal_structure_have_equal_fingerprints() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.1), nn.BatchNorm1d(4))

    assert fingerprint([block()]) == fingerprint([block()])
    assert fingerprint([block(), block()]) != fingerprint([block()])


def test_tying_parameters_of_two_layers_changes_the_fingerprint() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    untied = fingerprint([a, b])
    b.weight = a.weight
    assert fingerprint([a, b]) != untied


def test_a_fingerprint_tells_which_parameters_are_tied() -> None:
    def three_layers(first: int, second: int) -> list[nn.Linear]:
        layers = [nn.Linear(4, 4) for _ in range(3)]
        layers[second].weight = layers[first].weight
        return layers

    assert fingerprint(three_layers(0, 1)) == fingerprint(three_layers(0, 1))
    assert fingerprint(three_layers(0, 1)) != fingerprint(three_layers(0, 2))
    assert fingerprint(three_layers(0, 2)) != fingerprint(three_layers(1, 2))


def test_the_fingerprint_of_a_module_that_refers_to_its_parent_terminates() -> None:
    layer = nn.Sequential(nn.Linear(2, 2))
    layer[0].__dict__["owner"] = layer
    layer[0].__dict__["owners"] = [layer]
    assert fingerprint([layer]) == fingerprint([layer])
