"""The kernels that launch_cases.py launches: equal, but for what they are compiled for."""

import triton
import triton.language as tl


@triton.jit
def scale(x, y, count, factor, SIZE: tl.constexpr):
    """Computes ``y = factor x``; compiled for addresses that are divisible by 16."""
    o = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + o, tl.load(x + o, o < count) * factor, o < count)


@triton.jit
def scale_unaligned(x, y, count, factor, SIZE: tl.constexpr):
    """Computes ``y = factor x``."""
    o = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + o, tl.load(x + o, o < count) * factor, o < count)
