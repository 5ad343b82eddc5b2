"""The loops of a region: which of its axes are rows, and which are columns.

A program has blocks of rows and columns. A value varies over both, over one, or over neither::

    x, y: [4, 512, 1024]            rows (b t), columns (d)
    mean, rstd: [4, 512, 1]         rows
    weight: [1024]                  columns
    sums over rows: [1024]          columns; every program writes its own partial sum

A row that is reduced is whole in one program. Sums over rows end a region: they are complete when all
programs have ended, so only other kernels read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from gpipe_fast.fuse.regions.axes import Axes, Conflict, Dims
from gpipe_fast.fuse.regions.graph import Unit
from gpipe_fast.fuse.regions.values import (
    Constant,
    Input,
    Mapped,
    Reduced,
    Value,
    View,
    operands_of,
    root_of,
)
from gpipe_fast.lower.work import operator_name

# A program holds a row of at most so many elements in registers.
MAX_ROW = 8192
# With several sums over rows, each of which takes as many registers as a row.
MAX_ROW_WITH_SUMS = 4096

AxisSet = frozenset[int]


def _is_cast(value: Value) -> bool:
    return isinstance(value, Mapped) and value.template == "{0}"


@dataclass(frozen=True)
class Loops:
    """The axes of a region.

    Attributes:
        rows: the axes of rows, outermost first.
        cols: the axes of columns, outermost first.
        sizes: the number of elements along each axis.
        varies: the axes over which each value varies.
        shaped: the axes of each value, outermost first.
        dims: the axes of each of a value's dimensions.
        column_sums: the sums over rows, and casts of them; for each the sum.
        whole_rows: whether a program needs whole rows.
    """

    rows: tuple[int, ...]
    cols: tuple[int, ...]
    sizes: Mapping[int, int]
    varies: Mapping[Value, AxisSet]
    shaped: Mapping[Value, tuple[int, ...]]
    dims: Mapping[Value, Dims]
    column_sums: Mapping[Value, Value]
    whole_rows: bool

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return math.prod(self.sizes[a] for a in self.rows)

    @property
    def num_cols(self) -> int:
        """The number of columns."""
        return math.prod(self.sizes[a] for a in self.cols)

    @property
    def is_flat(self) -> bool:
        """Whether all axes are columns; then one kernel computes any number of columns."""
        return not self.rows and not self.whole_rows

    def strides_of(self, value: Value, tensor: Tensor) -> dict[int, int]:
        """Returns the stride of a tensor along each of its axes."""
        return _strides_of(self.dims[value], tensor, self.sizes.__getitem__)


def _strides_of(dims: Dims, tensor: Tensor, size: Callable[[int], int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for axes, stride in zip(dims, tensor.stride(), strict=True):
        for axis in reversed(axes):
            found[axis] = found.get(axis, 0) + stride
            stride *= size(axis)
    return found


def loops_of(units: Sequence[Unit], results: Iterable[Value], tensor_of: Mapping[Value, Tensor]) -> Loops:
    """Finds the loops that compute units.

    Args:
        units: the units, in order.
        results: the values that are stored, or views of them.
        tensor_of: the tensors that are read or stored, by the value behind them or the view.

    Raises:
        Conflict: no loops compute all of them in one pass.
    """
    return _Search(units, list(results), tensor_of).loops()


class _Search:
    def __init__(
        self, units: Sequence[Unit], results: Sequence[Value], tensor_of: Mapping[Value, Tensor]
    ) -> None:
        self.axes = Axes()
        self.values = [value for unit in units for value in unit.values]
        self.results = results
        self.tensor_of = tensor_of
        self.computed = set(self.values)
        self._dims: dict[Value, Dims] = {}
        for value in self.values:
            self.dims(value)
        for result in results:
            self.dims(result)

    def dims(self, value: Value) -> Dims:
        """Returns the axes of a value's dimensions, not resolved."""
        if value not in self._dims:
            self._dims[value] = self._make_dims(value)
        return self._dims[value]

    def _make_dims(self, value: Value) -> Dims:
        if isinstance(value, View):
            return self._viewed(value)
        if value not in self.computed or isinstance(value, (Input, Constant)):
            return self.axes.dims(value.shape)
        if isinstance(value, Reduced):
            return tuple(() if d in value.dims else a for d, a in enumerate(self.dims(value.operand)))
        assert isinstance(value, Mapped)
        return self._broadcast(value)

    def _viewed(self, view: View) -> Dims:
        own = self.dims(view.operand)
        if view.order is not None:
            return tuple(own[d] for d in view.order)
        if not view.expands:
            return self.axes.reshape(own, view.shape)
        added = len(view.shape) - len(own)
        before = (*(1,) * added, *view.operand.shape)
        aligned = (*((),) * added, *own)
        return tuple(
            (self.axes.new(size),) if size != old else axes
            for size, old, axes in zip(view.shape, before, aligned, strict=True)
        )

    def _broadcast(self, value: Mapped) -> Dims:
        found: list[tuple[int, ...]] = []
        operands = [(operand, self.dims(operand)) for operand in value.operands]
        for d in range(-len(value.shape), 0):
            chosen: tuple[int, ...] | None = None
            for operand, dims in operands:
                if len(operand.shape) >= -d and operand.shape[d] != 1:
                    own = dims[d]
                    if chosen is None:
                        chosen = own
                    else:
                        self.axes.identify(own, chosen)
            if chosen is None:
                chosen = () if value.shape[d] == 1 else (self.axes.new(value.shape[d]),)
            found.append(chosen)
        return tuple(found)

    def loops(self) -> Loops:
        resolved = {v: tuple(self.axes.resolve(a) for a in dims) for v, dims in self._dims.items()}
        shaped = {v: tuple(a for axes in dims for a in axes) for v, dims in resolved.items()}
        for axes in shaped.values():
            if len(set(axes)) < len(axes):
                raise Conflict("a tensor is combined with its own transpose")
        reduced: dict[Value, AxisSet] = {
            v: frozenset(a for d in v.dims for a in resolved[v.operand][d])
            for v in self.values
            if isinstance(v, Reduced)
        }
        stored = [shaped[r] for r in self.results]
        every = frozenset(a for axes in shaped.values() for a in axes)
        main = self._main(shaped, len(every))
        rows, cols, sums, whole = self._divide(every, reduced, main)
        sizes = {a: self.axes.size(a) for a in every}
        found = Loops(
            tuple(a for a in main if a in rows),
            tuple(a for a in main if a in cols),
            sizes,
            self._varies(shaped, reduced),
            shaped,
            resolved,
            sums,
            whole,
        )
        most = MAX_ROW if len({*sums.values()}) < 2 else MAX_ROW_WITH_SUMS
        if whole and found.num_cols > most:
            raise Conflict(f"rows have {found.num_cols} columns, such a kernel holds {most}")
        for result, axes in zip(self.results, stored, strict=True):
            own = frozenset(axes)
            if root_of(result) in sums:  # partial sums are added up by another kernel
                continue
            if own not in (every, rows, cols, frozenset()) or (not own and every):
                raise Conflict("a result has some of the rows or columns only")
        return found

    def _main(self, shaped: Mapping[Value, tuple[int, ...]], num_axes: int) -> tuple[int, ...]:
        """Returns all axes in the memory order of the largest tensor.

        Raises:
            Conflict: no tensor has all axes.
        """
        best: tuple[int, ...] | None = None
        for value, tensor in self.tensor_of.items():
            if value not in shaped or len(shaped[value]) != num_axes:
                continue
            strides = _strides_of(self._resolved(value), tensor, self.axes.size)
            order = tuple(sorted(shaped[value], key=lambda a: -strides[a]))
            if best is None or root_of(value) in self.computed:
                best = order
        if best is None:
            wide = [axes for axes in shaped.values() if len(axes) == num_axes]
            if not wide:
                raise Conflict("no value has all rows and columns")
            best = wide[0]
        return best

    def _resolved(self, value: Value) -> Dims:
        return tuple(self.axes.resolve(a) for a in self._dims[value])

    def _divide(
        self, every: AxisSet, reduced: Mapping[Value, AxisSet], main: Sequence[int]
    ) -> tuple[AxisSet, AxisSet, Mapping[Value, Value], bool]:
        """Returns rows, columns, the sums over rows, and whether programs need whole rows."""
        # Rows are contiguous in memory. Sums over another set of axes are sums over rows.
        sets = {axes for axes in reduced.values() if axes}
        cols = next((axes for axes in sets if main[-1] in axes), None)
        whole = cols is not None
        if cols is None and sets:
            cols = every - next(iter(sets))
        if cols is None:
            return frozenset(), every, {}, False
        rows = every - cols
        sums: dict[Value, Value] = {v: v for v, axes in reduced.items() if axes and axes != cols}
        if any(reduced[v] != rows or not isinstance(v, Reduced) or v.operation != "sum" for v in sums):
            raise Conflict("values are reduced over different dimensions")
        used = {root_of(o) for v in self.values for o in operands_of(v) if not _is_cast(v)}
        casts = {v: root_of(v.operands[0]) for v in self.values if isinstance(v, Mapped) and _is_cast(v)}
        sums |= {v: source for v, source in casts.items() if source in sums and v not in casts.values()}
        if not used.isdisjoint(sums) or any(v not in sums for v, source in casts.items() if source in sums):
            raise Conflict("a sum over rows is used again")
        return rows, cols, sums, whole

    def _varies(
        self, shaped: Mapping[Value, tuple[int, ...]], reduced: Mapping[Value, AxisSet]
    ) -> dict[Value, AxisSet]:
        found: dict[Value, AxisSet] = {}
        repeated: dict[Value, AxisSet] = {}  # the axes along which a tensor that is read has one element
        for value, tensor in self.tensor_of.items():
            pairs = zip(self._resolved(value), tensor.stride(), strict=True)
            repeated[root_of(value)] = frozenset(a for axes, stride in pairs if not stride for a in axes)

        def visit(value: Value) -> AxisSet:
            if value not in found:
                if value not in self.computed and not isinstance(value, View):
                    found[value] = frozenset(shaped[value]) - repeated.get(value, frozenset())
                else:
                    own: AxisSet = frozenset().union(*(visit(o) for o in operands_of(value)))
                    found[value] = own - reduced.get(value, frozenset())
            return found[value]

        for value in self._dims:
            visit(value)
        return found


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
        return [operator_name(unit.node) for unit in self.units]
