"""Which Python values have parts that can change, and how these are found."""

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

# Values that cannot change.
PLAIN = (
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


class Kind(Enum):
    """What a value is made of."""

    PLAIN = enum.auto()
    TUPLE = enum.auto()  # and frozensets: containers that cannot change themselves
    CONTAINER = enum.auto()  # list, dict, set, deque
    MODULE = enum.auto()
    OBJECT = enum.auto()  # attributes in a __dict__ or in slots
    FUNCTION = enum.auto()
    CLASS = enum.auto()
    PARTS = enum.auto()  # refers for good to other values, such as a partial or a bound method
    ARRAY = enum.auto()  # bytes outside of PyTorch, such as a NumPy array
    GENERATOR = enum.auto()  # NumPy's random numbers
    UNGUARDABLE = enum.auto()  # cannot be looked at without changing it, or differs between threads
    OPAQUE = enum.auto()  # compared by identity


# Packages whose classes and functions are taken as fixed: their own state is not a layer's.
_FIXED = frozenset(
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
_STANDARD = frozenset(sys.stdlib_module_names) - {"__main__"}
# Classes of the standard library that users keep settings in.
_HOLDERS = (types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList)


def root_package(name: object) -> str:
    """The first part of a module's name."""
    return name.partition(".")[0] if isinstance(name, str) else ""


def is_standard(name: object) -> bool:
    """Whether a module belongs to the standard library."""
    return root_package(name) in _STANDARD


def is_fixed(name: object) -> bool:
    """Whether a module belongs to PyTorch, this library or Python itself."""
    return root_package(name) in _FIXED or is_standard(name)


@functools.lru_cache(maxsize=4096)
def _kind_of_class(cls: Any) -> Kind:
    for kind, classes in _BY_CLASS:
        if issubclass(cls, classes):
            return kind
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if issubclass(cls, numpy.ndarray):
            return Kind.ARRAY
        if issubclass(cls, (numpy.random.Generator, numpy.random.RandomState)):
            return Kind.GENERATOR
        if issubclass(cls, numpy.generic):
            return Kind.OPAQUE
    if dataclasses.is_dataclass(cls) or issubclass(cls, _HOLDERS):
        return Kind.OBJECT
    if hasattr(cls, "__next__"):
        return Kind.UNGUARDABLE
    fixed = is_fixed(getattr(cls, "__module__", None)) or not is_heap_type(cls)
    return Kind.OPAQUE if fixed else Kind.OBJECT


def is_heap_type(cls: type) -> bool:
    """Whether a class was made at run time, and can be changed; the others are C's."""
    return bool(cls.__flags__ & 1 << 9)


_BY_CLASS: tuple[tuple[Kind, Any], ...] = (
    (Kind.PLAIN, PLAIN),
    (Kind.TUPLE, (tuple, frozenset)),
    (Kind.CONTAINER, (list, dict, set, collections.deque)),
    (Kind.OPAQUE, (Tensor, io.IOBase)),
    (Kind.MODULE, nn.Module),
    (Kind.FUNCTION, types.FunctionType),
    (Kind.CLASS, type),
    (Kind.PARTS, (functools.partial, types.MethodType, property, staticmethod, classmethod)),
    (Kind.ARRAY, (bytearray, array.array)),
    (Kind.UNGUARDABLE, (threading.local, types.GeneratorType)),
)


def kind_of(value: Any) -> Kind:
    """What a value is made of."""
    cls: Any = type(value)
    kind: Kind = _kind_of_class(cls)
    return kind


def parts_of(value: Any) -> tuple[object, ...]:
    """What a value of kind PARTS refers to."""
    match value:
        case functools.partial():
            return (value.func, value.args, value.keywords)
        case types.MethodType():
            return (value.__self__, value.__func__)
        case property():
            return (value.fget,)
    return (value.__func__,)


def items_of(container: Any) -> list[Any]:
    """What lies in a list, tuple, set, deque or dict, pairs there; not what a subclass makes of it."""
    for cls in (collections.OrderedDict, dict):
        if isinstance(container, cls):
            return list(cls.items(container))
    others: tuple[Any, ...] = (list, tuple, set, frozenset, collections.deque)
    for other in others:
        if isinstance(container, other):
            return list(other.__iter__(container))
    raise TypeError(f"no container: {type(container).__name__}")


def fill(container: Any, items: list[Any]) -> None:
    """Makes a list, set, deque or dict hold just these; see `items_of`."""
    for cls in (collections.OrderedDict, dict, list, set, collections.deque):
        if isinstance(container, cls):
            methods: Any = cls
            methods.clear(container)
            add = getattr(methods, "update", None) or methods.extend
            add(container, items)
            return


class Slot(NamedTuple):
    """An attribute that its class keeps in a slot, outside of any ``__dict__``."""

    name: str
    value: object


def slots_of(value: Any) -> Iterator[Slot]:
    """An object's attributes in slots, but for those that are unset."""
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
    """The ``__dict__`` of an object; None where it has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def state_of(generator: Any) -> Any:
    """The state of one of NumPy's generators, the newer ones' or a ``RandomState``'s."""
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Sets what `state_of` returned."""
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def computes_attributes(cls: type) -> bool:
    """Whether a class answers for attributes in Python, so that their names need not be those it keeps."""
    return any(
        isinstance(vars(base).get(name), types.FunctionType)
        for base in cls.__mro__
        for name in ("__getattr__", "__getattribute__")
    )


def cells_of(function: Any) -> dict[str, Any]:
    """The cells of the variables that a function has from those around it; but for those not set yet."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            cell.cell_contents  # noqa: B018
            found[name] = cell
    return found


def referred_to_by(value: Any) -> list[Any]:
    """The values that a value refers to, among which may be some that can change."""
    match kind_of(value):
        case Kind.TUPLE | Kind.CONTAINER:
            items = items_of(value)
            return [part for pair in items for part in pair] if isinstance(value, dict) else items
        case Kind.MODULE | Kind.OBJECT:
            slots = (slot.value for slot in slots_of(value))
            return [type(value), *(attributes_of(value) or {}).values(), *slots]
        case Kind.FUNCTION if not is_fixed(value.__module__):
            contents = (cell.cell_contents for cell in cells_of(value).values())
            return [value.__defaults__, value.__kwdefaults__, value.__dict__, *contents]
        case Kind.CLASS if not is_fixed(value.__module__):
            return [*value.__bases__, *(v for k, v in vars(value).items() if not k.startswith("__"))]
        case Kind.PARTS:
            return list(parts_of(value))
    return []
