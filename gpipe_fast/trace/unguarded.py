"""What Dynamo's guards miss: patched classes, functions with new code, and the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from gpipe_fast._extension import Snapshot
from gpipe_fast.trace.dynamo import Guards


def unguarded_state(guards: Iterable[Guards]) -> Callable[[], bool]:
    """Returns a function that returns whether the state that graphs' guards miss is as it is now."""
    guards = list(guards)
    snapshot = Snapshot()
    code = frozenset[CodeType]().union(*(each.code for each in guards))
    functions: list[tuple[FunctionType, CodeType, Any, Any]] = []
    for cls in dict.fromkeys(base for each in guards for own in each.classes for base in own.__mro__):
        if _is_python_class(cls):
            snapshot.add_class(cls)
            functions += [
                (each, each.__code__, each.__defaults__, each.__kwdefaults__)
                for each in _functions_of(cls)
                if each.__code__ in code
            ]
    if any(each.reads_environment for each in guards):
        snapshot.add_container(os.environ._data)  # type: ignore[attr-defined]

    def is_unchanged() -> bool:
        if not snapshot.unchanged(()):
            return False
        for function, own_code, defaults, keyword_defaults in functions:
            if (
                function.__code__ is not own_code
                or function.__defaults__ is not defaults
                or function.__kwdefaults__ is not keyword_defaults
            ):
                return False
        return True

    return is_unchanged


_HEAP_TYPE = 1 << 9


def _is_python_class(cls: type) -> bool:
    """Returns whether a class is written in Python, and not a class of tensors."""
    return bool(cls.__flags__ & _HEAP_TYPE) and not cls.__module__.startswith(("builtins", "torch._C"))


def _functions_of(cls: type) -> Iterator[FunctionType]:
    for value in vars(cls).values():
        if isinstance(value, property):
            candidates = [value.fget, value.fset]
        else:
            candidates = [getattr(value, "__func__", value)]
        yield from (each for each in candidates if isinstance(each, FunctionType))
