"""The values that layers can reach: attributes, elements, closures, and the variables that functions name."""

from __future__ import annotations

import dis
import enum
import gc
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

_LIBRARIES = (sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy", "triton", "gpipe_fast"}
# Libraries whose objects refer to the user's values, as lists and partial functions do.
_LIBRARIES_OF_CONTAINERS = ("builtins", "collections", "functools", "itertools", "types")
_ATOMIC = (bool, int, float, complex, str, bytes, type(None), enum.Enum)


def reachable(roots: Iterable[object], limit: int) -> tuple[list[Any], bool]:
    """Returns the values that some values can reach, breadth-first, and whether these are all.

    Functions, classes and most objects of libraries are taken to refer to nothing.

    Args:
        roots: the values to start from.
        limit: the maximum number of values to return.
    """
    found: dict[int, Any] = {}
    pending = deque(roots)
    while pending and len(found) < limit:
        value = pending.popleft()
        if not isinstance(value, _ATOMIC) and id(value) not in found:
            found[id(value)] = value
            pending.extend(_referents(value))
    return list(found.values()), not pending


def root_package(name: object) -> str:
    """Returns the first component of a module's name; "" if the name is not a string."""
    return name.partition(".")[0] if isinstance(name, str) else ""


def _referents(value: Any) -> Iterable[object]:
    match value:
        case ModuleType():
            return _values(value) if not _is_library(value.__name__) else ()
        case type():
            return (*value.__bases__, *_values(value)) if not _is_library(value.__module__) else ()
        case FunctionType():
            return _referents_of_function(value) if not _is_library(value.__module__) else ()
    package = root_package(type(value).__module__)
    holds_values = package not in _LIBRARIES or package in _LIBRARIES_OF_CONTAINERS
    return gc.get_referents(value) if holds_values or isinstance(value, nn.Module) else ()


def _is_library(name: object) -> bool:
    return root_package(name) in _LIBRARIES


def _values(namespace: ModuleType | type) -> list[object]:
    """Returns the attributes of a module or class, except those that no forward uses."""
    unused = ("__builtins__", "__init__")
    return [value for name, value in list(vars(namespace).items()) if name not in unused]


def _referents_of_function(function: FunctionType) -> Iterator[object]:
    yield from (function.__defaults__, function.__kwdefaults__, function.__dict__, function.__closure__)
    for code in _nested_code(function.__code__):
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield function.__globals__.get(instruction.argval)
            elif instruction.opname == "IMPORT_NAME":
                yield sys.modules.get(instruction.argval)


def _nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yields the code of a function, and of the functions, lambdas and generator expressions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_code(constant)
