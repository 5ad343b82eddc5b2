"""Facts that guards miss: signs of zero, types in containers, the order of sets, and which object it is."""

from __future__ import annotations

import enum
from typing import Any

import pytest
from torch import nn

from gpipe_fast.trace.unguarded import Facts, Read

AUTO, OTHER = object(), object()


class Kind(enum.Enum):
    """A choice, which guards compare themselves."""

    A = 1


def read(expression: str, with_keys: bool = False) -> Read:
    return Read(expression, compile(expression, "read", "eval"), {}, with_keys)


def layer_with(**attributes: Any) -> nn.Module:
    layer = nn.ReLU()
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def holds_after(before: Any, after: Any, with_keys: bool = False) -> bool:
    """Returns whether the facts about an attribute still hold if it is changed."""
    facts = Facts([read("L['layer'].value", with_keys=with_keys)], layer_with(value=before))
    return facts.hold({"layer": layer_with(value=after)})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0.0, -0.0),
        ((1, 2), (1.0, 2)),
        ((1, 2), (True, 2)),
        (frozenset({1}), frozenset({1.0})),
        ({"a", 8, None}, {"a", 9, None}),
        (AUTO, OTHER),
    ],
)
def test_values_that_guards_take_for_equal_are_told_apart(before: Any, after: Any) -> None:
    assert holds_after(before, before)
    assert not holds_after(before, after)


@pytest.mark.parametrize(("before", "after"), [(1, 2), ("a", "b"), (Kind.A, None), ([1], [2]), (1.5, 2.5)])
def test_values_that_guards_compare_are_left_to_them(before: Any, after: Any) -> None:
    assert holds_after(before, after)


def test_keys_of_a_dict_matter_if_an_absent_one_may_have_been_looked_for() -> None:
    assert holds_after({"a": 1}, {"a": 1, "b": 2})
    assert not holds_after({"a": 1}, {"a": 1, "b": 2}, with_keys=True)


def test_places_that_hold_the_same_object_are_told_from_those_that_do_not() -> None:
    shared = [1]
    reads = [read("L['layer'].first"), read("L['layer'].second")]
    facts = Facts(reads, layer_with(first=shared, second=shared))
    other = [2]
    assert facts.hold({"layer": layer_with(first=other, second=other)})
    assert not facts.hold({"layer": layer_with(first=[1], second=[1])})
