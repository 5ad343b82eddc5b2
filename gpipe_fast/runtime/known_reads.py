"""Known reads: the Python state that layers read in a trace, for layers equal to the traced ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from torch import nn

from gpipe_fast.runtime.cache import Cache
from gpipe_fast.trace import python_reads
from gpipe_fast.trace.python_reads import PythonReads

Fingerprint = Callable[[Sequence[nn.Module]], Hashable]


class KnownReads:
    """By fingerprint, the Python state that the layers with this fingerprint read in their first trace."""

    def __init__(self, fingerprint: Fingerprint, limit: int) -> None:
        """Makes an empty table of at most `limit` entries for a kind of fingerprint."""
        self._fingerprint = fingerprint
        self._reads: Cache[Hashable, list[PythonReads]] = Cache(limit)

    def fingerprint(self, layers: Sequence[nn.Module]) -> Hashable:
        """Returns the layers' fingerprint, including the state that equal layers read when traced."""
        found = self._fingerprint(layers)
        known = self._reads.find(found)
        if known is not None and python_reads.record(layers, known):
            return self._fingerprint(layers)
        return found

    def updated(self, layers: Sequence[nn.Module], before: Hashable) -> Hashable:
        """Returns the fingerprint after a trace; keeps what layers with the fingerprint before it read."""
        found = self._fingerprint(layers)
        if found != before:
            self._reads[before] = python_reads.reads_of_all(layers)
        return found
