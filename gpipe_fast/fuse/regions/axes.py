"""Axes: the loops of a region, which the dimensions of its values are made of.

A dimension is a product of axes. Tensors that are combined element by element share axes; a view may join
axes to one dimension, or divide an axis in two::

    x: [4, 512, 1024]          axes (b), (t), (d)
    x.view(2048, 1024)         axes (b t), (d)
    x.view(4, 512, 16, 64)     axes (b), (t), (h), (e): d is divided, in x too
    w: [1024]                  axes (d), or (h e)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# The axes of each dimension of a tensor, outermost first.
Dims = tuple[tuple[int, ...], ...]


class Conflict(Exception):
    """Values cannot be computed in the same loops; the message says why."""


class Axes:
    """Axes by number, while they are identified with each other and divided."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._same: list[int] = []
        self._parts: dict[int, tuple[int, int]] = {}

    def new(self, size: int) -> int:
        """Adds an axis."""
        self._sizes.append(size)
        self._same.append(len(self._same))
        return len(self._sizes) - 1

    def dims(self, shape: Iterable[int]) -> Dims:
        """Adds an axis for each dimension that has more than one element."""
        return tuple((self.new(size),) if size != 1 else () for size in shape)

    def size(self, axis: int) -> int:
        """Returns the number of elements along an axis."""
        return self._sizes[self._find(axis)]

    def resolve(self, axes: Iterable[int]) -> tuple[int, ...]:
        """Returns the undivided axes that axes consist of, outermost first."""
        found: list[int] = []
        for axis in map(self._find, axes):
            if axis in self._parts:
                found += self.resolve(self._parts[axis])
            else:
                found.append(axis)
        return tuple(found)

    def identify(self, left: Iterable[int], right: Iterable[int]) -> None:
        """Makes two products of axes the same.

        Raises:
            Conflict: neither of two axes can be divided to match the other.
        """
        pending = list(left), list(right)
        while pending[0] and pending[1]:
            a, b = self._pop(pending[0]), self._pop(pending[1])
            if a == b:
                continue
            if self._sizes[a] < self._sizes[b]:
                a, b, pending = b, a, (pending[1], pending[0])
            if self._sizes[a] > self._sizes[b]:
                outer, a = self._divide(a, self._sizes[b])
                pending[0].append(outer)
            self._same[a] = b
        if self.resolve([*pending[0], *pending[1]]):
            raise Conflict("dimensions of different sizes are combined")

    def reshape(self, dims: Dims, shape: Sequence[int]) -> Dims:
        """Returns the dimensions of a view with another shape.

        Raises:
            Conflict: the view divides an axis in parts of which neither size divides the other.
        """
        pending = [axis for dim in dims for axis in dim]
        found: list[tuple[int, ...]] = []
        for size in reversed(shape):
            taken: list[int] = []
            rest = size
            while rest > 1:
                axis = self._pop(pending)
                own = self._sizes[axis]
                if own > rest:
                    outer, axis = self._divide(axis, rest)
                    pending.append(outer)
                    own = rest
                elif rest % own:
                    raise Conflict("a view divides dimensions of other sizes")
                taken.insert(0, axis)
                rest //= own
            found.insert(0, tuple(taken))
        return tuple(found)

    def _pop(self, pending: list[int]) -> int:
        while True:
            axis = self._find(pending.pop())
            if axis not in self._parts:
                return axis
            pending += self._parts[axis]

    def _divide(self, axis: int, inner: int) -> tuple[int, int]:
        size = self._sizes[axis]
        if size % inner:
            raise Conflict("a view divides dimensions of other sizes")
        self._parts[axis] = self.new(size // inner), self.new(inner)
        return self._parts[axis]

    def _find(self, axis: int) -> int:
        while self._same[axis] != axis:
            axis = self._same[axis]
        return axis
