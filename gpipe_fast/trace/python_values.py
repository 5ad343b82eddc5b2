"""Kinds of Python values: which of them can change, and how their parts are read and restored."""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import dataclasses
import decimal
import enum
import functools
import gc
import io
import random
import sys
import threading
import types
import weakref
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
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

_VIEWS_OF_DICTS: tuple[Any, ...] = (
    types.MappingProxyType,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
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
    ITERATOR = enum.auto()  # reading would advance it, or it differs between threads
    HIDDEN = enum.auto()  # has state that only C code can enumerate, or that other threads change
    BY_IDENTITY = enum.auto()  # compared by identity


# Packages whose classes and functions are assumed not to change; the same holds for most of their objects.
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
# Modules of the standard library whose objects are immutable, apart from caches, or have state that does not
# affect what a layer computes.
_CONSTANT_MODULES = frozenset(
    {
        "_abc",
        "_functools",
        "_operator",
        "_struct",
        "_thread",  # locks
        "abc",
        "builtins",
        "datetime",
        "fractions",
        "functools",
        "inspect",
        "ipaddress",
        "logging",
        "operator",
        "pathlib",
        "re",
        "types",
        "typing",
        "uuid",
        "zoneinfo",
    }
)
# Modules of the standard library whose objects other threads or processes change.
CONCURRENCY_MODULES = frozenset({"threading", "queue", "concurrent", "multiprocessing", "asyncio", "sched"})


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
    if dataclasses.is_dataclass(cls):
        return ValueKind.OBJECT
    if hasattr(cls, "__next__"):
        return ValueKind.ITERATOR
    package = root_package(getattr(cls, "__module__", None))
    if package in _CONSTANT_PACKAGES or package in _CONSTANT_MODULES:
        return ValueKind.BY_IDENTITY
    if package in CONCURRENCY_MODULES:
        return ValueKind.HIDDEN
    if not _has_hidden_state(cls):
        return ValueKind.OBJECT
    # Functions and descriptors written in C, such as the fields of a named tuple, hold no value of their own.
    return ValueKind.BY_IDENTITY if hasattr(cls, "__get__") else ValueKind.HIDDEN


def _has_hidden_state(cls: Any) -> bool:
    """Returns whether instances have fields of a C struct, beside a ``__dict__`` and slots."""
    offsets = (cls.__dictoffset__, cls.__weakrefoffset__)  # negative if CPython stores them elsewhere
    num_pointers = len(_slot_names(cls)) + sum(offset > 0 for offset in offsets)
    visible = object.__basicsize__ + num_pointers * ctypes.sizeof(ctypes.c_void_p)
    return bool(cls.__itemsize__ or cls.__basicsize__ > visible)


def is_heap_type(cls: type) -> bool:
    """Returns whether a class was created at run time and is mutable; the others are static types in C."""
    return bool(cls.__flags__ & 1 << 9)


_BY_CLASS: tuple[tuple[ValueKind, Any], ...] = (
    (ValueKind.IMMUTABLE, IMMUTABLE),
    (ValueKind.TUPLE, (tuple, frozenset)),
    (ValueKind.CONTAINER, (list, dict, set, collections.deque)),
    (ValueKind.BY_IDENTITY, (Tensor, io.IOBase, random.Random, decimal.Decimal)),
    (ValueKind.MODULE, nn.Module),
    (ValueKind.FUNCTION, types.FunctionType),
    (ValueKind.CLASS, type),
    (ValueKind.OBJECT, (types.SimpleNamespace, types.ModuleType)),
    (ValueKind.REFERENCES, (functools.partial, types.MethodType, property, staticmethod, classmethod)),
    (ValueKind.REFERENCES, _VIEWS_OF_DICTS),
    (ValueKind.ARRAY, (bytearray, array.array)),
    (ValueKind.ITERATOR, (threading.local, types.GeneratorType)),
    (ValueKind.HIDDEN, (memoryview, weakref.ReferenceType, *weakref.ProxyTypes)),
)


def value_kind(value: Any) -> ValueKind:
    """Returns the kind of a value, by its class."""
    cls: Any = type(value)
    kind: ValueKind = _kind_of_class(cls)
    if (
        kind is ValueKind.OBJECT
        and isinstance(value, types.ModuleType)
        and is_assumed_constant(value.__name__)
    ):
        return ValueKind.BY_IDENTITY
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
        case types.MappingProxyType() | KeysView() | ValuesView() | ItemsView():
            return tuple(gc.get_referents(value))
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
