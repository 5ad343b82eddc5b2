"""Strides: the memory of strided tensors, how it is read, and whether tensors in the same memory overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpipe_fast.torch_private.fake_tensors import set_conj, set_neg

# Whether a tensor's elements are conjugated, and whether they are negated, when they are read from memory.
Bits = tuple[bool, bool]
NO_BITS: Bits = (False, False)


def bits_of(tensor: Any) -> Bits:
    """Returns the bits of a tensor or of its metadata."""
    return tensor.is_conj(), tensor.is_neg()


def empty_like(tensor: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Returns an uninitialized tensor of another one's layout, gaps and bits included."""
    empty = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device if device is None else device
    )
    return with_bits(empty, bits_of(tensor))


def with_bits(tensor: Tensor, bits: Bits) -> Tensor:
    """Returns a tensor after it got other bits, with which its memory reads as other elements."""
    set_conj(tensor, bits[0])
    set_neg(tensor, bits[1])
    return tensor


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the number of elements in memory from the first to the last of a tensor; 0 if it is empty.

    The span is less than the number of elements of the tensor if they overlap, and more if there are gaps::

        shape (2, 3), strides (4, 1):  0 1 2 . 4 5 6    1 + (2 - 1) * 4 + (3 - 1) * 1 = 7
    """
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a new tensor in PyTorch's default layout."""
    strides: list[int] = []
    expected = 1
    for size in reversed(shape):
        strides.append(expected)
        if size > 1:  # a size of 0 counts as 1
            expected = expected * size
    return tuple(reversed(strides))


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether elements of a tensor may be the same memory."""
    covered = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride < covered:
                return 0 not in shape
            covered += (size - 1) * stride
    return False


def may_overlap(
    a: tuple[Sequence[int], Sequence[int], int], b: tuple[Sequence[int], Sequence[int], int]
) -> bool:
    """Returns whether two tensors in the same memory may have an element in common.

    Exact for tensors with equal shapes and strides, such as two columns of a matrix::

        shape (2, 2), strides (4, 1), offsets 0 and 2:  a a b b a a b b

    Args:
        a: a tensor's shape, strides and first element; the strides are not negative.
        b: the other tensor's.
    """
    spans = [span(shape, strides) for shape, strides, _ in (a, b)]
    if 0 in spans or a[2] + spans[0] <= b[2] or b[2] + spans[1] <= a[2]:
        return False
    dims = sorted(zip(a[1], a[0], strict=True), reverse=True)
    return a[:2] != b[:2] or _is_combination(b[2] - a[2], [(st, si) for st, si in dims if si > 1])


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Returns whether the memory of two tensors may overlap; False for other than plain tensors."""
    if any(type(t) is not Tensor or t.layout is not torch.strided for t in (a, b)) or a.device != b.device:
        return False
    (begin, end), (other_begin, other_end) = (
        (t.data_ptr(), t.data_ptr() + span(t.shape, t.stride()) * t.element_size()) for t in (a, b)
    )
    return begin < other_end and other_begin < end


def _is_combination(distance: int, dims: Sequence[tuple[int, int]]) -> bool:
    """Returns whether a distance is a sum of strides, each fewer times than its size, in either direction."""
    if not dims:
        return distance == 0
    (stride, size), *rest = dims
    reach = sum(st * (si - 1) for st, si in rest)
    if stride == 0:
        return abs(distance) <= reach
    least, most = -((reach - distance) // stride), (distance + reach) // stride
    steps = range(max(least, 1 - size), min(most, size - 1) + 1)
    return any(_is_combination(distance - step * stride, rest) for step in steps)
