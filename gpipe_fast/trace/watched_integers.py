"""Watches which integer attributes of modules a trace reads.

Attributes of modules are in the instances' dictionaries, whose lookup calls no code. For the time of a trace,
a data descriptor in the class, which Python looks up first, stands before each watched attribute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from gpipe_fast.trace.fingerprint import ModuleInteger


class _Watch:
    """A data descriptor that reads an attribute from the instance's dictionary, and records it."""

    def __init__(self, name: str, read: set[tuple[int, str]]) -> None:
        self._name = name
        self._read = read

    def __get__(self, owner: Any, cls: type) -> Any:
        if owner is None or self._name not in vars(owner):
            raise AttributeError(f"no attribute {self._name!r} in {cls.__name__}")
        self._read.add((id(owner), self._name))
        return vars(owner)[self._name]

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)[self._name] = value

    def __delete__(self, owner: Any) -> None:
        del vars(owner)[self._name]


@contextlib.contextmanager
def watch_integers(integers: Sequence[ModuleInteger]) -> Iterator[set[int]]:
    """Yields the indices of the integers that may have been read; it is complete after the block.

    An integer that cannot be watched counts as read: if the class has an attribute of its name, or a way to
    read attributes past their lookup.
    """
    read: set[tuple[int, str]] = set()
    found: set[int] = set()
    watched: set[tuple[type, str]] = set()
    try:
        for index, (module, name, _) in enumerate(integers):
            cls = type(module)
            if (cls, name) in watched:
                continue
            if hasattr(cls, name) or cls.__getattribute__ is not nn.Module.__getattribute__:
                found.add(index)
                continue
            setattr(cls, name, _Watch(name, read))
            watched.add((cls, name))
        yield found
    finally:
        for cls, name in watched:
            delattr(cls, name)
        found |= {i for i, (module, name, _) in enumerate(integers) if (id(module), name) in read}
