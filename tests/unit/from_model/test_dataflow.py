"""Records of calls: what depends on what, and what may be left out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.from_model.dataflow import Dataflow, Owned, Place, Ref, Slice, map_slice
from tests.unit.from_model.recording import record_of

X = torch.ones(4, 3)


def names_of(flow: Dataflow) -> list[str]:
    return [getattr(call.target, "__name__", type(call.target).__name__) for call in flow.calls]


def test_unused_calls_are_left_out() -> None:
    def function(x: Tensor) -> Tensor:
        x.cos()
        return x.sin()

    flow = record_of(function, X)
    assert names_of(flow) == ["sin"]
    assert [call.result.leaves for call in flow.calls] == [(Ref(1),)]
    assert flow.result.leaves == (Ref(1),)


def test_unused_calls_with_an_effect_are_kept() -> None:
    def function(x: Tensor) -> Tensor:
        F.dropout(x)
        y = x.sin()
        y.add_(1)
        return y

    flow = record_of(function, X)
    assert names_of(flow) == ["dropout", "sin", "add_"]
    assert flow.calls[0].draws
    assert flow.calls[2].mutates == (flow.calls[1].result.leaves[0].index,)


def test_values_depend_on_inputs_and_on_random_numbers() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x.sin(), y.cos(), torch.arange(3), F.dropout(torch.ones(3))

    flow = record_of(function, X, X)
    of_x, of_y, constant, random = flow.result.refs()
    assert flow.depends_on([of_x], {0})
    assert not flow.depends_on([of_x], {1})
    assert not flow.depends_on([constant], {0, 1})
    assert flow.depends_on([random], set())
    assert flow.depends_on([constant, of_y], {1})


def test_producers_are_the_first_calls() -> None:
    flow = record_of(lambda x: x.sin().add_(1).cos(), X)
    producers = flow.producers()
    assert producers[flow.calls[0].result.leaves[0].index] == 0
    assert 0 not in producers


def test_an_owned_tensor_is_read_when_it_is_needed() -> None:
    layer = nn.Linear(2, 2)
    owned = Owned(layer, "weight")
    layer.weight = nn.Parameter(torch.zeros(2, 2))
    assert owned.read() is layer.weight
    assert owned == Owned(layer, "weight")
    assert hash(owned) == hash(Owned(layer, "weight"))
    assert owned != Owned(nn.Linear(2, 2), "weight")


def test_slices_refer_to_values() -> None:
    bounds: dict[Any, int | None] = {Ref(1): 2, None: None, 7: 7}
    assert map_slice(Slice(Ref(1), 7, None), bounds.__getitem__) == slice(2, 7, None)


def test_places_in_words() -> None:
    assert str(Place("model.py", 12, "forward")) == "model.py:12, in forward"
