"""Every kind of Python and NumPy value that a forward may read, at every place, and changed between calls.

The next call must show the change, whether the layer is traced again or runs in Python (contract 5).
"""

from __future__ import annotations

import builtins
import functools
import itertools
import random
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.contracts.contract_5_nothing_stale.python_values import READS, VALUES, Case, Read, cases
from tests.sampling import sample, seed

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = list(cases())
X = torch.arange(1.0, 5.0)[:, None]

# A layer, and a function that replaces the value that it reads.
Made = tuple[nn.Module, Callable[[Any], object]]


def layer_of(find: Callable[[Any], Any], read: Read, held: Any = None) -> nn.Module:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = held

        def forward(self, x: Tensor) -> Tensor:
            return x * read(find(self))

    return Reads()


def in_attribute(read: Read, value: Any) -> Made:
    layer = layer_of(lambda layer: layer.held, read, value)
    return layer, functools.partial(setattr, layer, "held")


def in_dict(read: Read, value: Any) -> Made:
    table = {"key": value}
    return layer_of(lambda layer: layer.held["key"], read, table), functools.partial(table.__setitem__, "key")


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def in_object(read: Read, value: Any) -> Made:
    held = Holder(value)
    return layer_of(lambda layer: layer.held.value, read, held), functools.partial(setattr, held, "value")


def in_class(read: Read, value: Any) -> Made:
    # As a static method, so that a function is not bound.
    held = type("Holder", (), {"value": staticmethod(value) if hasattr(type(value), "__get__") else value})
    layer = layer_of(lambda layer: layer.held.value, read, held)
    is_function = hasattr(type(value), "__get__")
    return layer, lambda new: setattr(held, "value", staticmethod(new) if is_function else new)


def in_property(read: Read, value: Any) -> Made:
    cls = type("Holder", (Holder,), {"shown": property(lambda self: self.value)})
    held = cls(value)
    return layer_of(lambda layer: layer.held.shown, read, held), functools.partial(setattr, held, "value")


def in_closure(read: Read, value: Any) -> Made:
    def replace(new: Any) -> None:
        nonlocal value
        value = new

    return layer_of(lambda layer: value, read), replace


def in_default(read: Read, value: Any) -> Made:
    def find(layer: Any, value: Any = value) -> Any:
        return value

    return layer_of(find, read), lambda value: setattr(find, "__defaults__", (value,))


def in_keyword_default(read: Read, value: Any) -> Made:
    def find(layer: Any, *, value: Any = value) -> Any:
        return value

    return layer_of(find, read), lambda value: setattr(find, "__kwdefaults__", {"value": value})


def in_recursive_function(read: Read, value: Any) -> Made:
    def find(layer: Any, times: int = 2, value: Any = value) -> Any:
        return find(layer, times - 1) if times else value

    return layer_of(find, read), lambda value: setattr(find, "__defaults__", (2, value))


def in_function_held_twice(read: Read, value: Any) -> Made:
    def function_of(value: Any) -> Callable[..., Any]:
        return lambda layer: value

    first = second = function_of(value)

    def replace(value: Any) -> None:
        nonlocal second
        second = function_of(value)

    return layer_of(lambda layer: (first(layer), second(layer))[1], read), replace


def in_partial(read: Read, value: Any) -> Made:
    def bound(value: Any) -> functools.partial[Any]:
        return functools.partial(lambda value, unused: value, value)

    layer = layer_of(lambda layer: layer.held(None), read, bound(value))
    return layer, lambda value: setattr(layer, "held", bound(value))


def in_global(read: Read, value: Any) -> Made:
    namespace: dict[str, Any] = {"VALUE": value, "__name__": "a_module", "__builtins__": builtins}
    find = types.FunctionType((lambda layer: VALUE).__code__, namespace)  # type: ignore[name-defined] # noqa: F821
    return layer_of(find, read), functools.partial(namespace.__setitem__, "VALUE")


def in_global_of_another_function(read: Read, value: Any) -> Made:
    def function_of(value: Any) -> Callable[[Any], Any]:
        return types.FunctionType(get.__code__, {"VALUE": value, "__builtins__": builtins})

    def get(layer: Any) -> Any:
        return VALUE  # type: ignore[name-defined] # noqa: F821

    layer = layer_of(lambda layer: layer.held(layer), read, function_of(value))
    return layer, lambda value: setattr(layer, "held", function_of(value))


def in_other_module(read: Read, value: Any) -> Made:
    module = sys.modules["module_of_python_values"] = types.ModuleType("module_of_python_values")
    module.value = value  # type: ignore[attr-defined]

    def find(layer: Any) -> Any:
        import module_of_python_values  # type: ignore[import-not-found]

        return module_of_python_values.value

    return layer_of(find, read), functools.partial(setattr, module, "value")


PLACES: dict[str, Callable[[Read, Any], Made]] = {
    make.__name__: make
    for make in (
        *(in_attribute, in_dict, in_object, in_class, in_property),
        *(in_closure, in_default, in_keyword_default, in_recursive_function, in_function_held_twice),
        *(in_partial, in_global, in_global_of_another_function, in_other_module),
    )
}


def found_by(layer: nn.Module) -> Tensor | None:
    try:
        found: Tensor = layer(X)
    except Exception:
        return None
    return found


# By value: the error if it is no attribute of the layer.
REFUSED = {"parameter": "needs a gradient and is not one of its parameters"}


def check(case: Case, place: str) -> None:
    """Checks two calls before a change, and two after it, unless the value is refused."""
    make, change = VALUES[case.value]
    value, other = make(1.0), make(2.0)
    layer, replace = PLACES[place](READS[case.read], value)
    pipe = GPipe(nn.Sequential(layer), [1], chunks=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(4):
            if call == 2 and case.in_place and change is not None:
                change(value)
            elif call == 2:
                replace(other)
            expected = found_by(layer)
            if expected is not None:  # at some places, values cannot be read
                try:
                    found = pipe(X)
                except RuntimeError as error:
                    if REFUSED.get(case.value, "\0") in str(error):
                        return
                    raise
                assert found.dtype == expected.dtype, (case, place, call)
                assert torch.equal(found, expected), (case, place, call, found, expected)


@pytest.mark.parametrize("place", PLACES)
def test_a_number_replaced_at_each_place_is_seen(place: str) -> None:
    check(Case("float", "factor", in_place=False), place)


@pytest.mark.parametrize(
    ("case", "place"), sample(list(itertools.product(CASES, PLACES)), 100, salt="python values"), ids=str
)
def test_a_changed_value_is_seen(case: Case, place: str) -> None:
    check(case, place)


@pytest.mark.soak
@pytest.mark.parametrize("kind", VALUES)
def test_a_changed_value_of_every_kind_is_seen(kind: str) -> None:
    draw = random.Random(f"{seed()}/{kind}")
    for case in CASES:
        if case.value == kind:
            check(case, draw.choice(list(PLACES)))


class ConstantOfClass(property):
    """A property of the class, as those of transformers' configurations."""

    def __get__(self, instance: object, owner: type | None = None) -> float:
        return 2.0


class Configuration:
    width = 1.0

    @ConstantOfClass
    def scale(self) -> float:
        return 3.0  # what Dynamo would read

    @property
    def doubled(self) -> float:
        return 2 * self.width


@pytest.mark.parametrize(
    ("name", "factor", "is_traced"), [("width", 1, True), ("doubled", 2, True), ("scale", 2, False)]
)
def test_only_a_property_that_is_read_is_refused(name: str, factor: float, is_traced: bool) -> None:
    layer = layer_of(lambda layer: layer.held, lambda held: getattr(held, name), Configuration())
    pipe = GPipe(nn.Sequential(layer), [1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(pipe(X), X * factor)
    assert any("overrides how a property is read" in str(each.message) for each in caught) != is_traced
