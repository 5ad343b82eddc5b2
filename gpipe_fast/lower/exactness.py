"""Whether a matrix product may add to its result in place without changing a bit."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def accumulates_exactly(a: Tensor, b: Tensor) -> bool:
    """Whether ``addmm(c, a, b)`` has the bits of ``c + mm(a, b)`` for operands laid out like these.

    A product kernel that sums a long inner dimension in blocks adds each block to the result, so that
    ``(c + p1) + p2`` stands where ``c + (p1 + p2)`` should. Where the blocks end is the library's own
    business, so the answer comes from trying it on random numbers, once per layout and thread count.
    """
    if a.device.type != "cpu" or not a.is_floating_point() or 0 in (*a.shape, *b.shape):
        return False
    return _tried(_layout(a), _layout(b), a.dtype, torch.get_num_threads())


# Results to compare before the order of summation counts as the same.
_ELEMENTS = 512

_Layout = tuple[tuple[int, ...], tuple[int, ...]]


def _layout(tensor: Tensor) -> _Layout:
    return tuple(tensor.shape), tuple(tensor.stride())


@functools.cache
def _tried(a: _Layout, b: _Layout, dtype: torch.dtype, threads: int) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(layout: _Layout) -> Tensor:
        sizes, strides = layout
        distinct = [size if stride else 1 for size, stride in zip(sizes, strides, strict=True)]
        tensor = torch.empty_strided(distinct, strides, dtype=dtype)
        # In float64, or products of float64 operands would not round at all.
        return tensor.copy_(torch.randn(distinct, generator=generator, dtype=torch.float64)).expand(sizes)

    # One trial of a small product could come out equal by chance.
    for _ in range(-(-_ELEMENTS // (a[0][0] * b[0][1]))):
        left, right = random(a), random(b)
        total = torch.randn(a[0][0], b[0][1], generator=generator, dtype=torch.float64).to(dtype)
        expected = total + left @ right
        torch.addmm(total, left, right, out=total)
        if not torch.equal(total, expected):
            return False
    return True
