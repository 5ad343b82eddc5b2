"""What Dynamo's guards miss: patched classes, functions with new code, and the environment."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from gpipe_fast._extension import Snapshot
from gpipe_fast.trace.dynamo import Guards

_TORCH = os.path.dirname(torch.__file__)


def unguarded_state(guards: Iterable[Guards]) -> Callable[[], bool]:
    """Returns a function that returns whether the state that graphs' guards miss is as it is now."""
    guards = list(guards)
    snapshot = Snapshot()
    code = frozenset[CodeType]().union(*(each.code for each in guards))
    functions: list[tuple[FunctionType, CodeType, Any, Any]] = []
    called = set[FunctionType]().union(*(each.functions for each in guards))
    names = {name for each in code if each.co_filename.startswith(_TORCH) for name in each.co_names}
    snapshot.add_dict_items(vars(torch), [name for name in names if callable(vars(torch).get(name))], False)
    snapshot.add_class(torch.Tensor)
    for cls in dict.fromkeys(base for each in guards for own in each.classes for base in own.__mro__):
        if _is_python_class(cls):
            snapshot.add_class(cls)
            run = [each for each in _functions_of(cls) if each.__code__ in code]
            functions += [(each, each.__code__, each.__defaults__, each.__kwdefaults__) for each in run]
            called.update(run)
    for function in called:
        shadowed = vars(builtins).keys() & set(function.__code__.co_names) - function.__globals__.keys()
        snapshot.add_dict_items(function.__globals__, shadowed, False)
    for each in guards:
        asked = _names_asked_for(each.code)
        for read in each.reads if asked else ():
            if read.name.startswith("G[") and isinstance(module := read.value(None), ModuleType):
                snapshot.add_dict_items(vars(module), asked, False)
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


def _names_asked_for(code: Iterable[CodeType]) -> set[str]:
    """Returns the names for which users' code may ask a Python module by ``hasattr``."""
    return {
        constant
        for each in code
        if not each.co_filename.startswith(_TORCH) and {"hasattr", "getattr"} & set(each.co_names)
        for constant in each.co_consts
        if isinstance(constant, str) and constant.isidentifier()
    }


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
