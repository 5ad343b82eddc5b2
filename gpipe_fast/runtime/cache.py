"""A least-recently-used cache."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Cache(OrderedDict[_Key, _Value]):
    """A least-recently-used cache with a maximum number of entries."""

    def __init__(self, limit: int) -> None:
        """Makes an empty cache of at most `limit` entries."""
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: _Key, value: _Value) -> None:
        super().__setitem__(key, value)
        while len(self) > self._limit:
            self.popitem(last=False)

    def entries(self) -> list[tuple[_Key, _Value]]:
        """Returns the entries, the least recently used first; other threads may change the cache."""
        while True:
            with contextlib.suppress(RuntimeError):  # changed during the iteration
                return list(self.items())

    def lookup(self, key: _Key) -> _Value | None:
        """Returns the entry, or None, and marks the entry as the most recently used."""
        found = self.get(key)
        with contextlib.suppress(KeyError):  # another thread may have evicted the entry
            self.move_to_end(key)
        return found
