"""Strides: how much memory the elements of a strided tensor span."""

from __future__ import annotations

from collections.abc import Sequence


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements in memory from a tensor's first to its last, both included; 0 if it has none.

    It is less than the tensor's number of elements where they overlap, and more where there are gaps::

        shape (2, 3), strides (4, 1):  0 1 2 . 4 5 6    1 + (2 - 1) * 4 + (3 - 1) * 1 = 7
    """
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
