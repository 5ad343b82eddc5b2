"""The generated source of small regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast import randomness  # noqa: F401, registers torch.ops.gpipe_fast
from gpipe_fast.fuse.regions.kernel import block_of
from gpipe_fast.fuse.regions.source import Source, source_of
from tests.unit.fuse.regions.made import region_of

BF16, CPU = torch.bfloat16, torch.device("cpu")

NORM = """\
    program = tl.program_id(0)
    first_col = 0
    col = first_col + tl.arange(0, COLS)[None, :]
    m_col = col < 96
    x2 = tl.load(p_in2 + col, mask=m_col).to(tl.float32)
    rows = program * ROWS + tl.arange(0, ROWS)
    row = rows.to(tl.int64)[:, None]
    m_row = row < num_rows
    x0 = tl.load(p_in0 + row * 96 + col, mask=m_row & m_col).to(tl.float32)
    x1 = tl.load(p_in1 + row * 96 + col, mask=m_row & m_col).to(tl.float32)
    # add
    v3 = (x0 + x1).to(tl.bfloat16).to(tl.float32)
    # _to_copy
    v4 = v3
    # _fused_rms_norm
    v5 = v4 * v4
    v6 = tl.sum(tl.where(m_col, v5, 0.0), axis=1, keep_dims=True)
    v7 = v6 * 0.010416666977107525
    v8 = tl.rsqrt(v7 + 1e-06)
    v9 = v4 * v8
    # _to_copy
    v10 = (v9).to(tl.bfloat16).to(tl.float32)
    # mul
    v11 = (v10 * x2).to(tl.bfloat16).to(tl.float32)
    tl.store(p_out0 + row * 96 + col, v3.to(tl.bfloat16), mask=m_row & m_col)
    tl.store(p_out1 + row * 96 + col, v11.to(tl.bfloat16), mask=m_row & m_col)
"""
SUM = """\
    program = tl.program_id(0)
    first_col = 0
    col = first_col + tl.arange(0, COLS)[None, :]
    m_col = col < 96
    sum4 = tl.zeros([ROWS, COLS], tl.float32)
    begin = program * rows_of_program
    end = tl.minimum(begin + rows_of_program, num_rows)
    for first_row in range(begin, end, ROWS):
        rows = first_row + tl.arange(0, ROWS)
        row = rows.to(tl.int64)[:, None]
        m_row = row < end
        x0 = tl.load(p_in0 + row * 96 + col, mask=m_row & m_col)
        x1 = tl.load(p_in1 + row * 96 + col, mask=m_row & m_col)
        # tanh
        v2 = hyperbolic_tangent(x0)
        # mul
        v3 = x1 * v2
        # sum
        sum4 += tl.where(m_row, v3, 0.0)
        tl.store(p_out0 + row * 96 + col, v3, mask=m_row & m_col)
"""
# Every program stores its own partial sum; one that has all rows stores the sum.
PARTIAL = """\
    tl.store(p_out1 + program.to(tl.int64) * 96 + col, \
tl.sum(sum4, axis=0, keep_dims=True), mask=m_col)
"""
WHOLE = "    tl.store(p_out1 + col, tl.sum(sum4, axis=0, keep_dims=True), mask=m_col)\n"


def source(
    function: Callable[..., Any], *shapes: Sequence[int], dtypes: Sequence[torch.dtype] = ()
) -> Source:
    region = region_of(function, *shapes, dtypes=dtypes)
    block, _ = block_of(region, CPU)
    return source_of(region, block)


def body(source: Source) -> str:
    """Returns what follows the kernel's signature."""
    return source.text.partition("constexpr):\n")[2].rstrip("\n") + "\n"


def _residual_norm(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, F.rms_norm(total.float(), (96,), None, 1e-6).to(x.dtype) * weight


def test_a_norm_of_a_sum() -> None:
    found = source(_residual_norm, (4, 32, 96), (4, 32, 96), (96,), dtypes=[BF16] * 3)
    assert body(found) == NORM
    assert found.name.startswith("fused_rms_norm_")
    arguments = "p_in0, p_in1, p_in2, p_out0, p_out1, num_rows, ROWS: tl.constexpr, COLS: tl.constexpr"
    assert f'@triton.jit(do_not_specialize=["num_rows"])\ndef {found.name}({arguments}):\n' in found.text


def _product_and_sum(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    product = g * torch.tanh(x)
    return product, product.sum(0)


def test_a_sum_over_rows() -> None:
    assert body(source(_product_and_sum, (300, 96), (300, 96))) == SUM + PARTIAL
    assert body(source(_product_and_sum, (3, 96), (3, 96))) == SUM + WHOLE


def test_equal_regions_have_equal_sources_and_others_do_not() -> None:
    first, second = (source(lambda x: torch.tanh(x) * 2.0, (4, 96)) for _ in range(2))
    assert first == second
    assert source(lambda x: torch.tanh(x) * 2.5, (4, 96)).name != first.name


def test_a_mask_for_all_rows_stands_before_the_rows() -> None:
    def dropout(x: Tensor, key: Tensor) -> Tensor:
        kept = torch.ops.gpipe_fast.keyed_bernoulli(
            key, 1, 0, list(x.shape), 0.9, dtype=torch.bool, device=x.device
        )
        return x * kept

    found = source(dropout, (6, 64), (3,), dtypes=[torch.float32, torch.int64])
    assert "v2 = keep_rows(tl.zeros([1], tl.int32), first_col, 0, " in found.text
    (draw,) = found.draws
    assert (draw.layer, draw.ordinal, draw.keep) == (1, 0, 0.9)


def test_numbers_are_stored_through_a_block_of_one_address() -> None:
    found = body(source(lambda x: torch.tanh(x) * 2.0, ()))
    assert "x0 = tl.load(p_in0)\n" in found
    assert "tl.store(p_out0 + tl.zeros([1, 1], tl.int32), v2)" in found


def test_one_kernel_computes_tensors_of_any_length() -> None:
    first, second = (source(lambda x: torch.tanh(x) * 2.0, (rows, 64)) for rows in (512, 600))
    assert first == second
    assert "m_col = col < num_cols\n" in first.text
    assert "@triton.jit\n" in first.text, "compiled for lengths that 16 divides"
