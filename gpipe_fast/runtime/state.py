"""The cached state of a module's layers: fingerprint, parameters and buffers, updated after a change."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Set

from torch import Tensor, nn

from gpipe_fast._extension import Snapshot
from gpipe_fast.trace import python_reads
from gpipe_fast.trace.fingerprint import fingerprint
from gpipe_fast.trace.joint_graph import buffers_of, parameters_of


class _Hashed:
    """A value with a cached hash, compared by identity first."""

    def __init__(self, value: Hashable) -> None:
        self._value = value
        self._hash = hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Hashed) and other._value == self._value)


class ModuleState:
    """The fingerprint, parameters and buffers of layers, as of the last update().

    Attributes:
        layers: the layers.
        fingerprint: everything about the layers that programs depend on (see `fingerprint`).
        parameters: the parameters of all layers; a shared parameter once.
        buffers: the buffers of all layers; a shared buffer once.
    """

    def __init__(self, in_python: Set[int] = frozenset()) -> None:
        """Makes an empty state; ``in_python`` contains the indices of Python layers, and may grow."""
        self._in_python = in_python
        self.layers: list[nn.Module] = []
        self.fingerprint: Hashable = None
        self.parameters: list[nn.Parameter] = []
        self.buffers: list[Tensor] = []
        self._snapshot: Snapshot | None = None
        self._reads_version = -1  # python_reads.version() at the last update()

    def is_outdated(self) -> bool:
        """Returns whether a trace has extended the Python state that layers read since the last update()."""
        return self._reads_version != python_reads.version()

    def update(self, layers: Collection[nn.Module]) -> bool:
        """Updates everything, and returns whether the layers were changed."""
        version = python_reads.version()
        if self._snapshot is not None and self._reads_version == version and self._snapshot.unchanged(layers):
            return False
        self._reads_version = version
        self._snapshot = Snapshot()
        self.layers = list(layers)
        self.fingerprint = _Hashed(fingerprint(layers, self._in_python, self._snapshot))
        self.parameters = parameters_of(layers)
        self.buffers = buffers_of(layers)
        return True
