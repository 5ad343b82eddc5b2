"""A test of whether ``addmm`` equals ``mm`` and ``add`` bit for bit."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from gpipe_fast.strides import span
from gpipe_fast.trace.formulas import decide
from gpipe_fast.trace.tensor_metadata import AnyTensor


def addmm_is_bitwise_equal(a: AnyTensor, b: AnyTensor) -> bool:
    """Returns whether ``addmm(c, a, b)`` equals ``c + mm(a, b)`` bit for bit for operands of these layouts.

    A product kernel that splits a long inner dimension into blocks adds each block to the result: it computes
    ``(c + p1) + p2`` instead of ``c + (p1 + p2)``. The library does not document its block sizes, so the
    function tries random operands, once per layout, dtype and thread count. Returns False off the CPU.
    """
    if a.device.type != "cpu" or not a.is_floating_point() or 0 in (*a.shape, *b.shape):
        return False
    return decide(_are_equal, _layout(a), _layout(b), a.dtype)


# The number of result elements that must be equal before the order of summation counts as equal.
_MIN_COMPARED_ELEMENTS = 512

# The number of random elements that all operands share; a prime, so that no row repeats another.
_NUM_DRAWN = 1_000_003
# The distance between the first elements of two operands.
_START_STEP = 314_159

_Layout = tuple[tuple[int, ...], tuple[int, ...]]


def _layout(tensor: AnyTensor) -> _Layout:
    return tuple(tensor.shape), tuple(tensor.stride())


def _are_equal(a: _Layout, b: _Layout, dtype: torch.dtype) -> bool:
    return _trials_are_equal(a, b, dtype, torch.get_num_threads())


@functools.cache
def _trials_are_equal(a: _Layout, b: _Layout, dtype: torch.dtype, threads: int) -> bool:
    starts = itertools.count(step=_START_STEP)

    def random(layout: _Layout) -> Tensor:
        sizes, strides = layout
        distinct = [size if stride else 1 for size, stride in zip(sizes, strides, strict=True)]
        tensor = torch.empty_strided(distinct, strides, dtype=dtype, device="cpu")
        _fill(tensor.as_strided([span(distinct, strides)], [1]), next(starts) % _NUM_DRAWN)
        return tensor.expand(sizes)

    # A small product is tried several times, since one trial could be equal by chance.
    rows, columns = a[0][0], b[0][1]
    for _ in range(-(-_MIN_COMPARED_ELEMENTS // (rows * columns))):
        left, right = random(a), random(b)
        total = random(((rows, columns), (columns, 1)))
        expected = (left @ right).add_(total)
        torch.addmm(total, left, right, out=total)
        if not torch.equal(total, expected):
            return False
    return True


def _fill(memory: Tensor, start: int) -> None:
    """Fills memory with random numbers, from the start-th on; they repeat if there is much memory."""
    drawn = _drawn(memory.dtype)
    first, rest = memory[: len(drawn) - start], memory[len(drawn) - start :]
    first.copy_(drawn[start : start + len(first)])
    for part in rest.split(len(drawn)):
        part.copy_(drawn[: len(part)])


@functools.cache
def _drawn(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    # Drawn as float64: random float32 values have so few bits that float64 products would not round.
    return torch.randn(_NUM_DRAWN, generator=generator, dtype=torch.float64, device="cpu").to(dtype)
