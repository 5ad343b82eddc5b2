"""Small kernels for the tests of the fake runtime."""

import triton
import triton.language as tl


@triton.jit
def scale(p_x, p_y, count, factor, SIZE: tl.constexpr):
    """Computes ``y = factor x``."""
    o = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(p_x + o, mask=o < count).to(tl.float32)
    tl.store(p_y + o, (x * factor).to(p_y.dtype.element_ty), mask=o < count)


@triton.jit
def add_in_place(p_x, p_y, count, SIZE: tl.constexpr):
    """Computes ``y += x``."""
    o = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x, y = tl.load(p_x + o, mask=o < count), tl.load(p_y + o, mask=o < count)
    tl.store(p_y + o, x + y, mask=o < count)


@triton.jit
def bf16_arithmetic(p_x, p_y, p_results, count, SIZE: tl.constexpr):
    """Stores x + y, x y, max(x, y), and x where x < y, else y, one after another."""
    o = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = o < count
    x, y = tl.load(p_x + o, mask=mask), tl.load(p_y + o, mask=mask)
    tl.store(p_results + o, x + y, mask=mask)
    tl.store(p_results + count + o, x * y, mask=mask)
    tl.store(p_results + 2 * count + o, tl.maximum(x, y), mask=mask)
    tl.store(p_results + 3 * count + o, tl.where(x < y, x, y), mask=mask)


@triton.jit
def not_interpretable(p_x, p_y, count, SIZE: tl.constexpr):
    """Copies through inline assembly, which the interpreter does not run."""
    o = tl.arange(0, SIZE)
    x = tl.load(p_x + o, mask=o < count)
    y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(p_y + o, y, mask=o < count)
