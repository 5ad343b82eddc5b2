"""What the code between blocks may read besides tensors: attributes of modules, configurations, variables.

Of the functions that a forward calls, only their identity is compared, and not what they read in turn.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from gpipe_fast.trace.repeatable import nested_code

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_TABLES = frozenset(vars(nn.Module())) - {"training"} | {"_gpipe_fast"}
_NOT_WALKED = (nn.Module, Tensor, type, ModuleType, logging.Logger)
# How deep objects in attributes of modules are looked into.
_DEPTH = 6
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)
# Larger arrays are compared by identity.
_MAX_BYTES = 4096


class Identity:
    """Compares an object by identity, and keeps it alive, so that no other object gets its address."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __hash__(self) -> int:
        return id(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._value is other._value


def attributes_of(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """Returns what the forwards of modules may read, as a key: another key means that one may do otherwise.

    These are the modules' attributes, and the global and outer variables that their forwards name. Plain
    values are compared by value, containers and objects such as configurations by what they contain, and
    everything else by identity.
    """
    found: list[Any] = []
    seen: set[int] = set()
    modules = list(modules)
    opened = set(modules)
    for module in modules:
        for name, value in _class_attributes(type(module)):
            found += [name, value]
        # A forward may read attributes of the modules that it calls, such as a rate.
        for called in module.children():
            for inner in called if isinstance(called, nn.ModuleList) else [called]:
                if inner not in opened:
                    found.extend(_attributes_of(inner, seen))
        forward = type(module).forward
        found += [
            Identity(module._modules),
            forward,
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
        ]
        for variable in _variables_of(forward):
            found.extend(_walk(variable, seen, _DEPTH))
        found.extend(_attributes_of(module, seen))
        for name, child in module._modules.items():
            found += [name, Identity(child), child is not None and child.training]
    return tuple(found)


def _attributes_of(module: nn.Module, seen: set[int]) -> Iterator[Any]:
    for name, value in vars(module).items():
        if name not in _TABLES:
            yield name
            yield from _walk(value, seen, _DEPTH)


def _class_attributes(cls: type) -> Iterator[tuple[str, Any]]:
    """Yields the plain attributes of a class and of its bases, up to `nn.Module`."""
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        yield from ((name, value) for name, value in vars(base).items() if isinstance(value, _PLAIN))


def _variables_of(forward: Any) -> Iterator[Any]:
    """Yields the global and outer variables that a forward, and what decorators have wrapped, name."""
    while isinstance(forward, FunctionType):
        names = [name for code in nested_code(forward.__code__) for name in code.co_names]
        yield from (forward.__globals__[name] for name in names if name in forward.__globals__)
        for cell in forward.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                yield cell.cell_contents
        yield from (forward.__defaults__, forward.__kwdefaults__)
        forward = getattr(forward, "__wrapped__", None)


@functools.lru_cache(maxsize=512)
def _slots_of(cls: Any) -> tuple[str, ...]:
    slots = (vars(base).get("__slots__", ()) for base in cls.__mro__)
    names = (name for own in slots for name in ([own] if isinstance(own, str) else own))
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _walk(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    if isinstance(value, _PLAIN):
        yield type(value)
        yield value
        return
    yield Identity(value)
    if id(value) in seen or not depth or isinstance(value, _NOT_WALKED):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for key, item in value.items():
            yield key if isinstance(key, _PLAIN) else Identity(key)
            yield from _walk(item, seen, depth - 1)
    elif hasattr(value, "__array_interface__"):  # of NumPy
        yield str(value.dtype), value.shape, value.tobytes() if value.nbytes <= _MAX_BYTES else b""
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield len(value)
        for item in value:
            yield from _walk(item, seen, depth - 1)
    elif not isinstance(value, _FUNCTIONS):
        cls: Any = type(value)
        for name in _slots_of(cls):
            yield from _walk(getattr(value, name, None), seen, depth - 1)
        yield from _walk(getattr(value, "__dict__", None), seen, depth - 1)
