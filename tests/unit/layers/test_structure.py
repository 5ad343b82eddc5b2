"""Nested values as tensors and a structure, and the arguments of a call."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import Tensor

from gpipe_fast.layers.structure import (
    ONE_TENSOR,
    Inputs,
    arguments_of,
    call_unpacked,
    canonical,
    flatten,
    replicate,
    tuple_structure,
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


def test_leaves_of_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="expected Tensor, but got object; tensors may be nested in tuples"):
        flatten([X, object()])


def test_a_tensor_that_occurs_twice_may_be_listed_once() -> None:
    assert len(flatten((X, X))[0]) == 2
    tensors, structure = flatten((X, [Y, X]), deduplicate=True)
    assert [id(t) for t in tensors] == [id(X), id(Y)]
    first, (_, last) = structure.build(tensors)
    assert first is last
    first, (_, last) = structure.build_unaliased(tensors)
    assert first is not last
    assert torch.equal(first, last)


def test_equal_structures_have_one_canonical_object() -> None:
    first, second = tuple_structure(2), tuple_structure(2)
    assert first is not second
    assert canonical(first) is canonical(second)
    assert canonical(flatten(torch.empty(3))[1]) is ONE_TENSOR


def test_arguments_of_a_call() -> None:
    inputs = Inputs.of((X, Y), {"scale": 2.0})
    assert arguments_of(inputs.build([X, Y])) == ((X, Y), {"scale": 2.0})
    assert call_unpacked(lambda x, y, scale: (x, y, scale), inputs.build([X, Y])) == (X, Y, 2.0)
    assert arguments_of(Inputs.of((X,), {}).build([Y])) == ((Y,), {})
    assert call_unpacked(len, [X, Y]) == 2


def test_micro_batches_of_several_tensors() -> None:
    inputs = Inputs.of(((X, replicate([Y]), X.T),), {}, (0, 1))
    assert inputs.dims.inputs == (0, None, 1)
    assert inputs.batch_size == 6
    parts = inputs.dims.split(inputs.tensors, 4)
    assert [[tuple(t.shape) for t in part] for part in parts] == [[(2, 2), (6, 3), (2, 2)]] * 3
    assert all(part[1] is Y for part in parts)


def test_replicated_values_are_marked_again() -> None:
    x, whole = Inputs.of(((X, replicate(Y)),), {}).build([X, Y])
    assert x is X
    assert whole.value is Y


@pytest.mark.parametrize("batch_dim", [(0,), (0, 0, 1)])
def test_a_dimension_is_needed_for_each_tensor_that_is_split(batch_dim: tuple[int, ...]) -> None:
    value: tuple[Tensor, ...] = (X, replicate(Y), X)
    with pytest.raises(ValueError, match=f"expected length 2, got length {len(batch_dim)}"):
        Inputs.of((value,), {}, batch_dim)
