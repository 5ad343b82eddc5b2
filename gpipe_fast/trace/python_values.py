"""Kinds of Python values: which of them can change, and how their parts are read and restored."""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import dataclasses
import enum
import functools
import io
import sys
import threading
import types
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Classes of immutable values.
IMMUTABLE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    enum.Enum,
)


class ValueKind(Enum):
    """How a value is guarded, and which parts it has."""

    IMMUTABLE = enum.auto()
    TUPLE = enum.auto()  # tuple, frozenset: immutable containers
    CONTAINER = enum.auto()  # list, dict, set, deque
    MODULE = enum.auto()
    OBJECT = enum.auto()  # attributes in a __dict__ or in slots
    FUNCTION = enum.auto()
    CLASS = enum.auto()
    REFERENCES = enum.auto()  # has immutable references to other values, as a partial or a bound method
    ARRAY = enum.auto()  # bytes outside of PyTorch, such as a NumPy array
    GENERATOR = enum.auto()  # NumPy's random generators
    UNGUARDABLE = enum.auto()  # an iterator, which reading would advance, or thread-local
    BY_IDENTITY = enum.auto()  # compared by identity


# Packages whose classes and functions are assumed not to change.
_CONSTANT_PACKAGES = frozenset(
    {
        "torch",
        "gpipe_fast",
        "numpy",
        "sympy",
        "mpmath",
        "triton",
        "functorch",
        "torchgen",
        "builtins",
        "typing_extensions",
        "networkx",
        "packaging",
        "optree",
        "filelock",
        "fsspec",
        "jinja2",
        "yaml",
    }
)
_STDLIB = frozenset(sys.stdlib_module_names) - {"__main__"}
# Classes of the standard library in which users keep settings.
_SETTINGS_CLASSES = (types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList)


def root_package(name: object) -> str:
    """Returns the first component of a module's name; "" if the name is not a string."""
    return name.partition(".")[0] if isinstance(name, str) else ""


def is_stdlib(name: object) -> bool:
    """Returns whether a module belongs to the standard library."""
    return root_package(name) in _STDLIB


def is_assumed_constant(name: object) -> bool:
    """Returns whether a module's classes and functions are assumed not to change."""
    return root_package(name) in _CONSTANT_PACKAGES or is_stdlib(name)


@functools.lru_cache(maxsize=4096)
def _kind_of_class(cls: Any) -> ValueKind:
    for kind, classes in _BY_CLASS:
        if issubclass(cls, classes):
            return kind
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if issubclass(cls, numpy.ndarray):
            return ValueKind.ARRAY
        if issubclass(cls, (numpy.random.Generator, numpy.random.RandomState)):
            return ValueKind.GENERATOR
        if issubclass(cls, numpy.generic):
            return ValueKind.BY_IDENTITY
    if dataclasses.is_dataclass(cls) or issubclass(cls, _SETTINGS_CLASSES):
        return ValueKind.OBJECT
    if hasattr(cls, "__next__"):
        return ValueKind.UNGUARDABLE
    fixed = is_assumed_constant(getattr(cls, "__module__", None)) or not is_heap_type(cls)
    return ValueKind.BY_IDENTITY if fixed else ValueKind.OBJECT


def is_heap_type(cls: type) -> bool:
    """Returns whether a class was created at run time and is mutable; the others are static types in C."""
    return bool(cls.__flags__ & 1 << 9)


_BY_CLASS: tuple[tuple[ValueKind, Any], ...] = (
    (ValueKind.IMMUTABLE, IMMUTABLE),
    (ValueKind.TUPLE, (tuple, frozenset)),
    (ValueKind.CONTAINER, (list, dict, set, collections.deque)),
    (ValueKind.BY_IDENTITY, (Tensor, io.IOBase)),
    (ValueKind.MODULE, nn.Module),
    (ValueKind.FUNCTION, types.FunctionType),
    (ValueKind.CLASS, type),
    (ValueKind.REFERENCES, (functools.partial, types.MethodType, property, staticmethod, classmethod)),
    (ValueKind.ARRAY, (bytearray, array.array)),
    (ValueKind.UNGUARDABLE, (threading.local, types.GeneratorType)),
)


def value_kind(value: Any) -> ValueKind:
    """Returns the kind of a value, by its class."""
    cls: Any = type(value)
    kind: ValueKind = _kind_of_class(cls)
    return kind


def references_of(value: Any) -> tuple[object, ...]:
    """Returns the values to which a value of kind REFERENCES refers."""
    match value:
        case functools.partial():
            return (value.func, value.args, value.keywords)
        case types.MethodType():
            return (value.__self__, value.__func__)
        case property():
            return (value.fget,)
    return (value.__func__,)


def container_items(container: Any) -> list[Any]:
    """Returns the elements of a list, tuple, set or deque, or the (key, value) pairs of a dict.

    Methods that a subclass overrides are not called.
    """
    for cls in (collections.OrderedDict, dict):
        if isinstance(container, cls):
            return list(cls.items(container))
    others: tuple[Any, ...] = (list, tuple, set, frozenset, collections.deque)
    for other in others:
        if isinstance(container, other):
            return list(other.__iter__(container))
    raise TypeError(f"expected a list, tuple, set, deque or dict, got a {type(container).__name__}")


def replace_items(container: Any, items: list[Any]) -> None:
    """Replaces the contents of a list, set, deque or dict by items as `container_items` returns them."""
    for cls in (collections.OrderedDict, dict, list, set, collections.deque):
        if isinstance(container, cls):
            methods: Any = cls
            methods.clear(container)
            add = getattr(methods, "update", None) or methods.extend
            add(container, items)
            return


class Slot(NamedTuple):
    """An attribute that is stored in a slot (``__slots__``), not in a ``__dict__``."""

    name: str
    value: object


def slots_of(value: Any) -> Iterator[Slot]:
    """Yields an object's attributes in slots, except unset ones."""
    cls: Any = type(value)
    for name in _slot_names(cls):
        try:
            yield Slot(name, object.__getattribute__(value, name))
        except AttributeError:
            continue


@functools.lru_cache(maxsize=1024)
def _slot_names(cls: Any) -> tuple[str, ...]:
    declared = (base for base in cls.__mro__ if "__slots__" in vars(base))
    members = ((n, m) for base in declared for n, m in vars(base).items())
    return tuple(name for name, member in members if isinstance(member, types.MemberDescriptorType))


def attributes_of(value: object) -> dict[str, Any] | None:
    """Returns the ``__dict__`` of an object; None if the object has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def generator_state(generator: Any) -> Any:
    """Returns the state of a NumPy ``Generator`` or ``RandomState``."""
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Sets a NumPy generator's state to one that `generator_state` returned."""
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def has_dynamic_attributes(cls: type) -> bool:
    """Returns whether a class computes attributes in Python (``__getattr__``), from others that it stores."""
    return any(
        isinstance(vars(base).get(name), types.FunctionType)
        for base in cls.__mro__
        for name in ("__getattr__", "__getattribute__")
    )


def cells_of(function: Any) -> dict[str, Any]:
    """Returns the closure cells of a function by variable name, except empty ones."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            cell.cell_contents  # noqa: B018
            found[name] = cell
    return found


def referents_of(value: Any) -> list[Any]:
    """Returns the values to which a value refers, if any of them may be mutable."""
    match value_kind(value):
        case ValueKind.TUPLE | ValueKind.CONTAINER:
            items = container_items(value)
            return [part for pair in items for part in pair] if isinstance(value, dict) else items
        case ValueKind.MODULE | ValueKind.OBJECT:
            slots = (slot.value for slot in slots_of(value))
            return [type(value), *(attributes_of(value) or {}).values(), *slots]
        case ValueKind.FUNCTION if not is_assumed_constant(value.__module__):
            contents = (cell.cell_contents for cell in cells_of(value).values())
            return [value.__defaults__, value.__kwdefaults__, value.__dict__, *contents]
        case ValueKind.CLASS if not is_assumed_constant(value.__module__):
            return [*value.__bases__, *(v for k, v in vars(value).items() if not k.startswith("__"))]
        case ValueKind.REFERENCES:
            return list(references_of(value))
    return []
