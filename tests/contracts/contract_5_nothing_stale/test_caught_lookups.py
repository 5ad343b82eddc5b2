"""Keys and attributes that a forward looks for, by every usual way to ask whether they exist.

The next call must show one that has come, gone, or changed, and none of these layers runs in Python.
"""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.sampling import sample

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "GPIPE_FAST_TEST_LATE"
X = torch.arange(1.0, 5.0)[:, None]
# What the name means before a change and after it; None if it does not exist.
CHANGES = {"comes": (None, "3"), "goes": ("2", None), "changes": ("2", "3")}


# A function that returns what the name means in a holder, or something else.
Way = Callable[[Any], Any]


def find_key(table: Any) -> Any:
    return table[NAME]


def find_attribute(held: Any) -> Any:
    return getattr(held, NAME)


def caught_key(table: Any) -> Any:
    try:
        return table[NAME]
    except KeyError:
        return 7


def caught_key_by_base(table: Any) -> Any:
    try:
        found = table[NAME]
    except LookupError:
        found = 7
    finally:
        table = None
    return found


def key_of_a_function(table: Any) -> Any:
    try:
        return find_key(table)
    except KeyError:
        return 7


def replaced_error(table: Any) -> Any:
    try:
        try:
            return table[NAME]
        except KeyError as error:
            raise ValueError(NAME) from error
    except ValueError:
        return 7


def suppressed_key(table: Any) -> Any:
    with contextlib.suppress(KeyError):
        return table[NAME]
    return 7


def key_of_a_copy(table: Any) -> Any:
    own = {**table}
    try:
        return own[NAME]
    except KeyError:
        return 7


def caught_attribute(held: Any) -> Any:
    try:
        return held.GPIPE_FAST_TEST_LATE
    except AttributeError:
        return 7


def attribute_of_a_function(held: Any) -> Any:
    try:
        return find_attribute(held)
    except AttributeError:
        return 7


KEYS = {
    "[]": caught_key,
    "LookupError": caught_key_by_base,
    "a function": key_of_a_function,
    "another error": replaced_error,
    "suppress": suppressed_key,
    "a copy": key_of_a_copy,
    "union": lambda table: table[NAME] if NAME in {"a"}.union(table) else 7,
    "get": lambda table: table.get(NAME, 7),
    "get of None": lambda table: table.get(NAME) or 7,
    "in": lambda table: table[NAME] if NAME in table else 7,  # noqa: SIM401
}
ATTRIBUTES = {
    ".": caught_attribute,
    "a function": attribute_of_a_function,
    "default": lambda held: getattr(held, NAME, 7),
    "hasattr": lambda held: held.GPIPE_FAST_TEST_LATE if hasattr(held, NAME) else 7,
}

MODULE = types.ModuleType("module_of_caught_lookups")


class Plain:
    pass


class Own:
    """Looks in a table for what it does not have, as configurations do."""

    def __init__(self, table: dict[str, str] | None = None) -> None:
        self.table = table or {}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["table"][name]
        except KeyError:
            raise AttributeError(name) from None


class Layer(nn.Module):
    """Multiplies by what it finds in what it holds."""

    def __init__(self, find: Callable[[Any], Any], ask: Callable[[Any], Any], held: Any) -> None:
        super().__init__()
        self.find, self.ask, self.held = find, ask, held

    def forward(self, x: Tensor) -> Tensor:
        return x * float(self.ask(self.find(self)))


class Holder(NamedTuple):
    """Something that has keys or attributes.

    Attributes:
        ways: the ways to ask it.
        held: makes what the layer holds.
        find: what the layer asks.
        changed: what a change changes, given the layer.
        without: what the layer multiplies by before the name exists.
    """

    ways: dict[str, Way]
    held: Callable[[], Any] = lambda: None
    find: Callable[[Any], Any] = lambda layer: layer.held
    changed: Callable[[Any], Any] = lambda layer: layer.held
    without: float = 7.0


TABLE: dict[str, Any] = {"other": "5"}


def own_class() -> Any:
    return type("Fresh", (Plain,), {})


HOLDERS = {
    "the environment": Holder(KEYS, find=lambda layer: os.environ, changed=lambda layer: os.environ),
    "a global dict": Holder(KEYS, find=lambda layer: TABLE, changed=lambda layer: TABLE),
    "a dict of a module": Holder(KEYS, find=lambda layer: MODULE.table, changed=lambda layer: MODULE.table),
    "a dict of the layer": Holder(KEYS, dict),
    "a dict of an object": Holder(KEYS, Own, lambda layer: layer.held.table, lambda layer: layer.held.table),
    "an OrderedDict": Holder(KEYS, collections.OrderedDict),
    "vars": Holder(KEYS, Plain, lambda layer: vars(layer.held), lambda layer: vars(layer.held)),
    "a view of a dict": Holder(
        KEYS,
        lambda: (own := {}, types.MappingProxyType(own)),
        lambda layer: layer.held[1],
        lambda layer: layer.held[0],
    ),
    "a UserDict": Holder(KEYS, collections.UserDict),
    "a ChainMap": Holder(
        KEYS, lambda: collections.ChainMap({}, {}), changed=lambda layer: layer.held.maps[1]
    ),
    "a module": Holder(ATTRIBUTES, find=lambda layer: MODULE, changed=lambda layer: vars(MODULE)),
    "an object": Holder(ATTRIBUTES, Plain, changed=lambda layer: vars(layer.held)),
    "the layer": Holder(ATTRIBUTES, find=lambda layer: layer, changed=lambda layer: AttributesOf(layer)),
    "a class": Holder(ATTRIBUTES, own_class, changed=lambda layer: AttributesOf(layer.held)),
    "the class of an object": Holder(
        ATTRIBUTES, lambda: own_class()(), changed=lambda layer: AttributesOf(type(layer.held))
    ),
    "the base of a class": Holder(
        ATTRIBUTES,
        lambda: type("Derived", (own_class(),), {})(),
        changed=lambda layer: AttributesOf(type(layer.held).__base__),
    ),
    "an object with __getattr__": Holder(ATTRIBUTES, Own, changed=lambda layer: layer.held.table),
    "before __getattr__": Holder(ATTRIBUTES, Own, changed=lambda layer: vars(layer.held)),
    "over __getattr__": Holder(
        ATTRIBUTES, lambda: Own({NAME: "5"}), changed=lambda layer: vars(layer.held), without=5.0
    ),
    "a global function": Holder(
        ATTRIBUTES, find=lambda layer: find_key, changed=lambda layer: vars(find_key)
    ),
    "a module's submodule": Holder(
        ATTRIBUTES,
        lambda: nn.Sequential(nn.ReLU()),
        lambda layer: layer.held[0],
        lambda layer: AttributesOf(layer.held[0]),
    ),
}


class AttributesOf:
    """The attributes of an object as items."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)

    def pop(self, name: str, default: Any = None) -> None:
        if name in vars(self.owner):
            delattr(self.owner, name)


# Dynamo does not know of which dictionary a view is one.
IN_PYTHON = {
    ("a view of a dict", way) for way in ("[]", "LookupError", "a function", "another error", "suppress")
}

CASES = [(holder, way, change) for holder, kind in HOLDERS.items() for way in kind.ways for change in CHANGES]


@pytest.fixture(autouse=True)
def same_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, MODULE.__name__, MODULE)
    vars(MODULE).update(table={})
    yield
    for table in (os.environ, TABLE, vars(MODULE), vars(find_key)):
        table.pop(NAME, None)


def become(changed: Any, value: str | None) -> None:
    if value is None:
        changed.pop(NAME, None)
    else:
        changed[NAME] = value


def check(holder: str, way: str, change: str) -> None:
    """Checks calls before a change, after it, and after its reversal."""
    kind = HOLDERS[holder]
    layer = Layer(kind.find, kind.ways[way], kind.held())
    before, after = CHANGES[change]
    become(kind.changed(layer), before)
    pipe = GPipe(nn.Sequential(layer), [1], chunks=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for value in (before, before, after, after, before):
            become(kind.changed(layer), value)
            expected = layer(X)
            assert float(expected[0]) == (float(value) if value is not None else kind.without)
            assert torch.equal(pipe(X), expected), (value, expected)
    refused = [str(each.message) for each in caught if "Python" in str(each.message)]
    assert not refused or (holder, way) in IN_PYTHON, refused


@pytest.mark.parametrize(("holder", "way", "change"), sample(CASES, 60, salt="caught lookups"))
def test_what_is_looked_for_is_seen_to_come_and_go(holder: str, way: str, change: str) -> None:
    check(holder, way, change)


@pytest.mark.soak
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_looked_for_by_every_way_is_seen_to_come_and_go(holder: str) -> None:
    for way in HOLDERS[holder].ways:
        for change in CHANGES:
            check(holder, way, change)
