"""A region: units that one kernel computes, what it reads, and what it stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from gpipe_fast.fuse.regions.graph import Unit
from gpipe_fast.fuse.regions.loops import Loops
from gpipe_fast.fuse.regions.values import Value


@dataclass(frozen=True)
class Access:
    """A tensor that a region reads or stores.

    Attributes:
        node: its node.
        value: the node's value, perhaps a view of what is computed.
    """

    node: fx.Node
    value: Value

    @property
    def tensor(self) -> Tensor:
        """An example of the tensor."""
        found: Tensor = self.node.meta["val"]
        return found


@dataclass(frozen=True)
class Region:
    """Units that one kernel computes.

    Attributes:
        units: the units, in the graph's order.
        loops: their rows and columns.
        inputs: what the kernel reads.
        outputs: what it stores.
        saved: how many bytes less are read and written.
    """

    units: tuple[Unit, ...]
    loops: Loops
    inputs: tuple[Access, ...]
    outputs: tuple[Access, ...]
    saved: int = 0

    @property
    def operators(self) -> Sequence[str]:
        """The names of the units' operators, as in ``native_layer_norm``."""
        return [operator_name(unit) for unit in self.units]


def operator_name(unit: Unit) -> str:
    """Returns the name of a unit's operator, without its overload."""
    schema = getattr(unit.node.target, "_schema", None)
    return str(unit.node.target) if schema is None else schema.name.partition("::")[2]
