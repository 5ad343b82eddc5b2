"""Small Triton kernels for the tests of `gpipe_fast.fuse`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _doubled(value):
    return value * 2


@triton.jit
def double(p_x, p_y, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    tl.store(p_y + offsets, _doubled(tl.load(p_x + offsets, mask=mask)), mask=mask)


@triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=[])
@triton.jit
def tuned(p_x, p_y, size, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(p_y + offsets, tl.load(p_x + offsets))


@triton.jit
def wrong(p_x, p_y, size, BLOCK: tl.constexpr):
    tl.store(p_y + tl.arange(0, BLOCK), tl.arange(0, BLOCK + 1))


@triton.jit
def split_in_two(p_x, p_low, p_high, size, offset, scale, flag, BLOCK: tl.constexpr):
    """Has arguments of all types; it never runs."""


@triton.jit(do_not_specialize=["offset"])
def not_specialized(p_x, p_y, size, offset, BLOCK: tl.constexpr):
    """Is compiled for any offset; it never runs."""


@triton.jit
def products(p_x, p_y, p_product, p_sums, p_sums_of_x, p_flags, BLOCK: tl.constexpr):
    """Returns products and their partial sums; it never runs."""
