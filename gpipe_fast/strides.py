"""Strides: how many elements of memory a strided tensor spans."""

from __future__ import annotations

from collections.abc import Sequence


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the number of elements in memory from the first to the last of a tensor; 0 if it is empty.

    The span is less than the number of elements of the tensor if they overlap, and more if there are gaps::

        shape (2, 3), strides (4, 1):  0 1 2 . 4 5 6    1 + (2 - 1) * 4 + (3 - 1) * 1 = 7
    """
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
