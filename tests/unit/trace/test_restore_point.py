"""The restore point of a trace, which names and undoes changes to attributes, containers and objects."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_fast.trace.fingerprint import fingerprint
from gpipe_fast.trace.restore_point import Change, RestorePoint
from tests.unit.trace.test_fingerprint import Layer, Mode

EFFECTS: dict[str, tuple[Callable[[Layer], object], str]] = {
    "attribute set": (lambda m: setattr(m, "last", torch.ones(1)), "last"),
    "attribute replaced": (lambda m: setattr(m, "mode", Mode.EXACT), "mode"),
    "list appended": (lambda m: m.sizes.append(5), "sizes"),
    "list element replaced": (lambda m: m.sizes.__setitem__(0, 9), "sizes"),
    "dict updated": (lambda m: m.options.update(eps=1.0), "options"),
    "set added": (lambda m: m.tags.add("c"), "tags"),
    "child attribute set": (lambda m: setattr(m.first, "calls", 1), "first.calls"),
}


@pytest.mark.parametrize(("effect", "name"), EFFECTS.values(), ids=EFFECTS.keys())
def test_a_restore_point_names_and_undoes_an_effect(effect: Callable[[Layer], object], name: str) -> None:
    layer = Layer()
    value = fingerprint([layer])
    before = RestorePoint([layer])
    effect(layer)
    assert fingerprint([layer]) != value
    assert before.changes() == [Change(0, name)]
    before.restore()
    assert fingerprint([layer]) == value
    assert before.changes() == []
    before.restore()


def test_restoring_puts_back_the_original_objects() -> None:
    layer = Layer()
    sizes, weight = layer.sizes, layer.first.weight
    before = RestorePoint([layer])
    layer.sizes = [7]
    layer.first.weight = nn.Parameter(torch.zeros(4, 4))
    assert before.changes() == [Change(0, "sizes")]  # parameters are restored but not reported
    before.restore()
    assert layer.sizes is sizes
    assert layer.first.weight is weight


def test_restoring_brings_back_a_deleted_attribute() -> None:
    layer = Layer()
    before = RestorePoint([layer])
    del layer.mode
    assert before.changes() == [Change(0, "mode")]
    before.restore()
    assert layer.mode is Mode.FAST


def test_a_change_names_the_index_of_its_layer() -> None:
    layers = [Layer(), Layer()]
    before = RestorePoint(layers)
    layers[1].dropout.p = 0.5
    assert before.changes() == [Change(1, "dropout.p")]
    before.restore()
    assert layers[1].dropout.p == 0.1


def test_an_unchanged_layer_reports_no_changes() -> None:
    assert RestorePoint([Layer()]).changes() == []


class InstantiatingDict(collections.OrderedDict[str, type]):
    """Returns a new instance of the stored class on every lookup, as a table of activation functions does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


def test_a_dict_that_computes_its_values_is_compared_by_what_it_stores() -> None:
    layer = Layer()
    layer.table = InstantiatingDict(relu=nn.ReLU, lazy=object)
    before = RestorePoint([layer])
    value = fingerprint([layer])
    assert before.changes() == []
    assert fingerprint([layer]) == value
    layer.table["other"] = nn.GELU
    assert before.changes() == [Change(0, "table")]
    assert fingerprint([layer]) != value
    before.restore()
    assert list(layer.table) == ["relu", "lazy"]
    assert fingerprint([layer]) == value
