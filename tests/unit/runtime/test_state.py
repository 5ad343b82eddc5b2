"""The cached state of the layers: every change is detected, and nothing is computed again without one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast._extension import Snapshot
from gpipe_fast.runtime.state import ModuleState
from gpipe_fast.trace.dynamo import capture
from gpipe_fast.trace.layer_states import LayerStates, StateKey, describe


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.module_list = nn.ModuleList([nn.ReLU(), nn.Linear(2, 2)])
        self.scale = 0.1
        self.table = {"a": 1}
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def snapshot_of(layers: Collection[nn.Module]) -> Snapshot:
    """Returns a snapshot of the layers' current state."""
    snapshot = Snapshot()
    snapshot.set_roots(layers)
    describe(layers, snapshot)
    return snapshot


CHANGES: dict[str, Callable[[Layer], object]] = {
    "attribute": lambda m: setattr(m, "scale", 0.2),
    "attribute deleted": lambda m: delattr(m, "scale"),
    "item of a dictionary": lambda m: m.table.update(b=2),
    "parameter replaced": lambda m: setattr(m.linear, "weight", nn.Parameter(torch.ones(4, 4))),
    "parameter swapped": lambda m: torch.utils.swap_tensors(m.linear.weight, nn.Parameter(torch.ones(4, 4))),
    "frozen": lambda m: m.linear.weight.requires_grad_(False),
    "buffer replaced": lambda m: setattr(m, "mask", torch.zeros(4)),
    "eval": lambda m: m.norm.eval(),
    "child replaced": lambda m: setattr(m, "linear", nn.Linear(4, 4)),
    "hook": lambda m: m.linear.register_forward_hook(lambda *_: None),
    "class": lambda m: setattr(m.module_list[0], "__class__", nn.Tanh),
    "dtype": lambda m: m.half(),
}


# The old programs remain valid for the new tensor or layer, which has the same properties as the old one, and
# for attributes that no forward has read.
SAME_PROGRAMS = {
    *("parameter replaced", "parameter swapped", "buffer replaced", "child replaced"),
    *("attribute", "attribute deleted", "item of a dictionary", "hook"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_detected(name: str) -> None:
    layers = [nn.ReLU(), Layer()]
    snapshot, state = snapshot_of(layers), ModuleState(LayerStates())
    assert snapshot.unchanged(layers)
    assert state.update(layers)
    state.update_key()
    before = state.key
    assert not state.update(layers)
    state.update_key()
    assert state.key is before
    CHANGES[name](layers[1])  # type: ignore[arg-type]
    assert not snapshot.unchanged(layers)
    assert state.update(layers)
    state.update_key()
    assert (state.key == before) == (name in SAME_PROGRAMS)
    assert state.key != before or hash(state.key) == hash(before)
    assert [id(p) for p in state.parameters] == [id(p) for p in layers[1].parameters()]
    assert [id(b) for b in state.buffers] == [id(b) for b in layers[1].buffers()]
    assert snapshot_of(layers).unchanged(layers)


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


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = (torch.randn(4), 4)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.kept[0]


def test_a_capture_of_one_layer_does_not_change_the_key_of_an_equal_one() -> None:
    """A state without guards holds for both; the tensor that the first uses is no change of the second."""
    states, layers, x = LayerStates(), [Table(), Table()], torch.randn(2, 4)
    key = StateKey.of(states, layers, None)
    first, second = key.states
    assert first is second
    first.add(layers[0], "key", capture(layers[0], (x,), {}))
    assert key.guards_hold(layers, [0, 1])
    assert StateKey.of(states, layers, None).states[1] is not first
