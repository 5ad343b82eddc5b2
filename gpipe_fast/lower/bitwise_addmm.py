"""A test of whether ``addmm`` equals ``mm`` and ``add`` bit for bit."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def addmm_is_bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Returns whether ``addmm(c, a, b)`` equals ``c + mm(a, b)`` bit for bit for operands of these layouts.

    A product kernel that splits a long inner dimension into blocks adds each block to the result: it computes
    ``(c + p1) + p2`` instead of ``c + (p1 + p2)``. The library does not document its block sizes, so the
    function tries random operands, once per layout, dtype and thread count. Returns False off the CPU.
    """
    if a.device.type != "cpu" or not a.is_floating_point() or 0 in (*a.shape, *b.shape):
        return False
    return _trials_are_equal(_layout(a), _layout(b), a.dtype, torch.get_num_threads())


# The number of result elements that must be equal before the order of summation counts as equal.
_MIN_COMPARED_ELEMENTS = 512

# The number of random elements drawn for an operand; larger operands repeat them. A prime, so that the
# repetitions do not coincide with rows.
_MAX_DRAWN = 1_000_003

_Layout = tuple[tuple[int, ...], tuple[int, ...]]


def _layout(tensor: Tensor) -> _Layout:
    return tuple(tensor.shape), tuple(tensor.stride())


@functools.cache
def _trials_are_equal(a: _Layout, b: _Layout, dtype: torch.dtype, threads: int) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(layout: _Layout) -> Tensor:
        sizes, strides = layout
        distinct = [size if stride else 1 for size, stride in zip(sizes, strides, strict=True)]
        tensor = torch.empty_strided(distinct, strides, dtype=dtype)
        return tensor.copy_(_random_elements(tensor.numel(), dtype, generator).view(distinct)).expand(sizes)

    # A small product is tried several times, since one trial could be equal by chance.
    for _ in range(-(-_MIN_COMPARED_ELEMENTS // (a[0][0] * b[0][1]))):
        left, right = random(a), random(b)
        total = random(((a[0][0], b[0][1]), (b[0][1], 1)))
        expected = total + left @ right
        torch.addmm(total, left, right, out=total)
        if not torch.equal(total, expected):
            return False
    return True


def _random_elements(number: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    # Drawn as float64: random float32 values have so few bits that float64 products would not round.
    drawn = torch.randn(min(number, _MAX_DRAWN), generator=generator, dtype=torch.float64).to(dtype)
    return drawn.repeat(-(-number // len(drawn)))[:number]
