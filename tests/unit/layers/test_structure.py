"""Nested values as tensors and a structure, and the arguments of a call."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast.layers.structure import (
    Inputs,
    arguments_of,
    call_unpacked,
    flatten,
    layer_title,
    replicate,
)

Pair = namedtuple("Pair", "first second")
X, Y = torch.zeros(6, 2), torch.ones(6, 3)


def test_a_nested_value_is_rebuilt() -> None:
    value = {"pair": Pair(X, [Y, None]), "name": "sum", "count": 2, "dtype": torch.float16}
    tensors, structure = flatten(value)
    assert [id(t) for t in tensors] == [id(X), id(Y)]
    again = structure.build([Y, X])
    assert again == {"pair": Pair(Y, [X, None]), "name": "sum", "count": 2, "dtype": torch.float16}
    assert type(again["pair"]) is Pair
    assert str(structure) == (
        "{'pair': Pair(first=..., second=[..., None]), 'name': 'sum', 'count': 2, 'dtype': torch.float16}"
    )


def test_structures_are_equal_if_nesting_and_constants_are() -> None:
    def structure(value: object) -> object:
        return flatten((X, value))[1]

    assert structure(float("nan")) == structure(float("nan"))
    assert hash(structure(1)) == hash(structure(1))
    for other in (True, 1.0, "1", None):
        assert structure(1) != structure(other)
    assert structure(0.0) != structure(-0.0)
    assert structure([X]) != structure((X,))


def test_a_tensor_that_occurs_twice_may_be_listed_once() -> None:
    assert len(flatten((X, X))[0]) == 2
    tensors, structure = flatten((X, [Y, X]), deduplicate=True)
    assert [id(t) for t in tensors] == [id(X), id(Y)]
    first, (_, last) = structure.build(tensors)
    assert first is last
    first, (_, last) = structure.build_unaliased(tensors)
    assert first is not last
    assert torch.equal(first, last)


def test_a_title_has_the_position_or_name_and_the_class() -> None:
    assert layer_title(3, nn.Linear(1, 1)) == "layer 3 (Linear)"
    assert layer_title("4.norm", nn.BatchNorm1d(1)) == "layer '4.norm' (BatchNorm1d)"


def test_arguments_of_a_call() -> None:
    inputs = Inputs.of((X, Y), {"scale": 2.0})
    assert arguments_of(inputs.build([X, Y])) == ((X, Y), {"scale": 2.0})
    assert call_unpacked(lambda x, y, scale: (x, y, scale), inputs.build([X, Y])) == (X, Y, 2.0)
    assert arguments_of(Inputs.of((X,), {}).build([Y])) == ((Y,), {})
    assert call_unpacked(len, [X, Y]) == 2


@pytest.mark.parametrize("batch_dim", [(0,), (0, 0, 1)])
def test_a_dimension_is_needed_for_each_tensor_that_is_split(batch_dim: tuple[int, ...]) -> None:
    value: tuple[Tensor, ...] = (X, replicate(Y), X)
    with pytest.raises(ValueError, match=f"expected length 2, got length {len(batch_dim)}"):
        Inputs.of((value,), {}, batch_dim)
