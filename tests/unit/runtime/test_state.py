"""The cached state of the layers: every change is detected, and nothing is computed again without one."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gpipe_fast._extension import Snapshot
from gpipe_fast.runtime import state as state_module
from gpipe_fast.runtime.state import ModuleState
from gpipe_fast.trace.fingerprint import fingerprint


@dataclasses.dataclass
class Config:
    size: int = 3
    names: list[str] = dataclasses.field(default_factory=lambda: ["a"])


@dataclasses.dataclass(slots=True)
class Slotted:
    size: int = 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.module_list = nn.ModuleList([nn.ReLU(), nn.Linear(2, 2)])
        self.config = Config()
        self.slotted = Slotted()
        self.scale = 0.1
        self.sizes = [1, 2, {"deep": (3, [4])}]
        self.tags = {"x"}
        self.tensor = torch.ones(2)
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Plus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def snapshot_of(layers: Iterable[nn.Module]) -> Snapshot:
    """Returns a snapshot of the layers' current state."""
    snapshot = Snapshot()
    fingerprint(layers, snapshot=snapshot)
    return snapshot


CHANGES: dict[str, Callable[[Layer], object]] = {
    "attribute": lambda m: setattr(m, "scale", 0.2),
    "new attribute": lambda m: setattr(m, "other", None),
    "attribute deleted": lambda m: delattr(m, "scale"),
    "item of a list": lambda m: m.sizes.append(5),
    "deep in containers": lambda m: m.sizes[2]["deep"][1].append(5),
    "item of a set": lambda m: m.tags.add("y"),
    "field of a dataclass": lambda m: setattr(m.config, "size", 4),
    "list in a dataclass": lambda m: m.config.names.append("b"),
    "parameter replaced": lambda m: setattr(m.linear, "weight", nn.Parameter(torch.ones(4, 4))),
    "parameter removed": lambda m: setattr(m.linear, "bias", None),
    "shape in place": lambda m: setattr(m.linear.weight, "data", torch.ones(5, 4)),
    "strides in place": lambda m: setattr(m.linear.weight, "data", torch.ones(4, 4).t()),
    "dtype in place": lambda m: setattr(m.linear.weight, "data", torch.ones(4, 4).double()),
    "frozen": lambda m: m.linear.weight.requires_grad_(False),
    "buffer replaced": lambda m: setattr(m, "mask", torch.zeros(4)),
    "eval": lambda m: m.norm.eval(),
    "child replaced": lambda m: setattr(m, "linear", nn.Linear(4, 4)),
    "child of a list": lambda m: m.module_list.append(nn.ReLU()),
    "hook": lambda m: m.linear.register_forward_hook(lambda *_: None),
    "class": lambda m: setattr(m.module_list[0], "__class__", nn.Tanh),
    "parametrization": lambda m: parametrize.register_parametrization(m.linear, "weight", Plus()),
    "dtype": lambda m: m.half(),
}


# The old programs remain valid for the new tensor or layer, which has the same properties as the old one.
SAME_PROGRAMS = {"parameter replaced", "buffer replaced", "child replaced"}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_detected(name: str) -> None:
    layers = [nn.ReLU(), Layer()]
    snapshot, before = snapshot_of(layers), fingerprint(layers)
    assert snapshot.unchanged(layers)
    CHANGES[name](layers[1])  # type: ignore[arg-type]
    assert not snapshot.unchanged(layers)
    assert (fingerprint(layers) == before) == (name in SAME_PROGRAMS)
    assert snapshot_of(layers).unchanged(layers)


def test_other_layers_are_detected_as_a_change() -> None:
    layers = [nn.ReLU(), nn.Linear(2, 2)]
    snapshot = snapshot_of(layers)
    assert snapshot.unchanged(tuple(layers))
    for others in (layers[:1], [*layers, nn.ReLU()], layers[::-1], [layers[0], nn.Linear(2, 2)], []):
        assert not snapshot.unchanged(others)


def test_training_is_not_detected_as_a_change() -> None:
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()]
    model, snapshot = nn.Sequential(*layers), snapshot_of(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    model.load_state_dict(model.state_dict())
    optimizer.zero_grad()
    assert snapshot.unchanged(layers)


def test_lazy_layers_always_count_as_changed() -> None:
    lazy = nn.LazyLinear(3)
    snapshot = snapshot_of([lazy])
    lazy(torch.ones(1, 2))
    assert not snapshot.unchanged([lazy])


def test_the_fingerprint_is_computed_again_only_after_a_change() -> None:
    layers = [Layer()]
    with mock.patch.object(state_module, "fingerprint", side_effect=fingerprint) as computed:
        state = ModuleState()
        for _ in range(3):
            state.update(layers)
        assert computed.call_count == 1
        assert [id(p) for p in state.parameters] == [id(p) for p in layers[0].parameters()]
        assert [id(b) for b in state.buffers] == [id(b) for b in layers[0].buffers()]
        before = state.fingerprint
        layers[0].linear.weight = nn.Parameter(torch.zeros(4, 4))
        state.update(layers)
        assert computed.call_count == 2
        # Programs remain valid for the new parameter, but the state must list it.
        assert state.fingerprint == before
        assert hash(state.fingerprint) == hash(before)
        assert state.parameters[0] is layers[0].linear.weight


def test_a_reference_cycle_through_a_snapshot_is_collected() -> None:
    layer = nn.ReLU()
    layer.back = [snapshot_of([layer])]
    layer.back.append(snapshot_of([layer]))
    weak_layer = weakref.ref(layer)
    del layer
    gc.collect()
    assert weak_layer() is None


def test_a_snapshot_keeps_its_objects_alive() -> None:
    """Otherwise, a new float at the old float's address could be mistaken for it."""
    layer = nn.ReLU()
    for i in range(100):
        layer.slope = 0.5 + i
        snapshot = snapshot_of([layer])
        layer.slope = None
        layer.slope = 0.25 + i
        assert not snapshot.unchanged([layer])
