"""Where the elements of a region's tensors lie: offsets as expressions of a row and a column.

Axes that lie behind each other in every tensor are counted as one. With rows (b, t), and x[b, t, d] in the
order of memory but y[t, b, d]::

    x: row * 1024 + col
    y: (row // 512) * 1024 + (row % 512) * 4096 + col

Rows are int64. Columns are int32, so a term that may exceed int32 is converted before it is multiplied: the
halves of 40,000 rows of 57,344 elements are read at ``(col // 28672).to(tl.int64) * 57344``. The kernel of
fewer rows is another one, without the conversion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Strides = Mapping[int, int]

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Layout:
    """One of the two loops of a region, rows or columns.

    Attributes:
        index: the name of the loop's index.
        groups: the axes that are counted as one, outermost first, each with its number of elements.
        is_int64: whether the index is int64; an int32 index is converted where an offset needs it.
    """

    index: str
    groups: tuple[tuple[tuple[int, ...], int], ...]
    is_int64: bool

    @staticmethod
    def of(
        index: str,
        axes: Sequence[int],
        sizes: Mapping[int, int],
        tensors: Iterable[Strides],
        is_int64: bool = False,
    ) -> Layout:
        """Returns the layout of axes, outermost first, for tensors with these strides."""
        given = list(tensors)
        groups: list[list[int]] = []
        for axis in axes:
            if groups and all(_continues(t, groups[-1][-1], axis, sizes) for t in given):
                groups[-1].append(axis)
            else:
                groups.append([axis])
        return Layout(index, tuple((tuple(g), math.prod(sizes[a] for a in g)) for g in groups), is_int64)

    def offset(self, strides: Strides) -> str:
        """Returns the offset of a tensor's element, as an expression; "" if it is always 0."""
        terms = []
        inner = 1
        for i, (axes, size) in reversed(list(enumerate(self.groups))):
            stride = strides.get(axes[-1], 0)
            if stride:
                terms.append(self._term(i, inner, size, stride))
            inner *= size
        return " + ".join(reversed(terms))

    def _term(self, group: int, inner: int, size: int, stride: int) -> str:
        found = self.index if inner == 1 else f"{self.index} // {inner}"
        if group:
            found = f"({found}) % {size}" if inner > 1 else f"{found} % {size}"
        if " " in found:
            found = f"({found})"
        if not self.is_int64 and (size - 1) * stride > _MAX_INT32:
            found += ".to(tl.int64)"
        return found if stride == 1 else f"{found} * {stride}"


def _continues(strides: Strides, outer: int, inner: int, sizes: Mapping[int, int]) -> bool:
    return strides.get(outer, 0) == strides.get(inner, 0) * sizes[inner]


def contiguous_strides(axes: Sequence[int], sizes: Mapping[int, int]) -> dict[int, int]:
    """Returns the strides of a contiguous tensor with these axes, outermost first."""
    found: dict[int, int] = {}
    stride = 1
    for axis in reversed(axes):
        found[axis] = stride
        stride *= sizes[axis]
    return found
