"""A least-recently-used cache, and estimates of the bytes that graphs, programs and plans keep in caches.

A stage of 6 GPT blocks, for one size of its input (measured under CPython 3.11 and torch 2.14)::

    joint graph       778 nodes     2.2 MiB    dropped if a template gives it again
    split graphs    2,100 nodes     2.6 MiB    dropped once lowered
    programs        1,590 values    0.8 MiB    as data; dropped with the graph
                    1,590 values    0.9 MiB    as C++ objects, kept until evicted

A segment is kept by up to four caches, and `Eviction` removes it from all::

    Planner.plans              256 signatures     plans, whose chains hold it
    Compiler._compiled         512 stages         each with the segments lowered from it
    CompiledStage._segments    as many as are asked for, by what they save
    Segments._lowered          64 of those found at run time, beside layers in Python
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from gpipe_fast.layers.device_memory import device_memory_bytes
from gpipe_fast.layers.quantized import stored_bytes

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


# Estimates in bytes. Those of programs leave out constants, which belong to the graph.
NODE_BYTES = 3_000  # a node, its arguments, and the fake tensor that it computes
VALUE_BYTES = 550  # a value of a program, with its share of the steps, as data
NATIVE_VALUE_BYTES = 560  # the same as a C++ object
PLAN_BYTES = 20_000  # a plan without its programs: the signature, keys of states, and
ACTION_BYTES = 400  # the actions

# The variable of the environment with the limit, in MiB.
LIMIT_VARIABLE = "GPIPE_FAST_PLANS_MIB"
# By default, plans may keep this fraction of the parameters' bytes; or this fraction of the host's memory, at
# most so many bytes, if that is more.
_FRACTION_OF_PARAMETERS, _FRACTION_OF_HOST, _MAX_OF_HOST = 1 / 8, 1 / 16, 1 << 30


def limit_bytes(parameters: Iterable[Tensor]) -> int:
    """Returns the limit for the bytes that the plans of a module keep.

    Raises:
        ValueError: the environment variable is not a number of at least 0.
    """
    wanted = os.environ.get(LIMIT_VARIABLE)
    if wanted is None:
        of_host = min(_MAX_OF_HOST, _FRACTION_OF_HOST * device_memory_bytes(torch.device("cpu")))
        return int(max(of_host, _FRACTION_OF_PARAMETERS * sum(map(stored_bytes, set(parameters)))))
    try:
        number = float(wanted)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise ValueError(f"{LIMIT_VARIABLE} must be a number of MiB of at least 0, got {wanted!r}")
    return int(number * 2**20)
