"""Gradients of query, key and value as one matrix, with the sums of its columns.

Query, key and value are views of the output of one linear layer, a matrix with a row for each token.
Attention returns their gradients as separate tensors, with dimensions in any order in memory. One pass writes
them to the matrix that is the gradient of the layer's output, and sums its columns for the layer's bias::

    parts    dq, dk, dv of shape (batch, length, heads, head_dim)
    matrix   row batch * length:  dq of all heads, dk of all heads, dv of all heads
             or, with heads first:  dq, dk, dv of head 0;  dq, dk, dv of head 1;  ...
    sums     of the matrix over rows

Memory traffic per element of itemsize i: i bytes are read and i written. PyTorch reads the matrix again for
the sums. Partial sums take one row per program; another launch (kernels/partial_sums.py) adds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels.launch import Config, cdiv, launch, num_partial_sums
from gpipe_fast.kernels.partial_sums import launch_partial_sums

# Configurations by the maximum number of columns of a part; the first entry that is wide enough applies.
CONFIGS = {64: Config({"ROWS": 32, "COLS": 64}), 1 << 62: Config({"ROWS": 16, "COLS": 128})}
MAX_PARTS = 3


def choose(num_cols: int) -> Config:
    """Returns the configuration for parts with ``num_cols`` columns each."""
    return next(config for width, config in CONFIGS.items() if num_cols <= width)


@triton.jit
def _copy_block(
    p_part, p_out, batches, positions, heads, dims, offsets, mask, stride_batch, stride_position, stride_head
):
    """Copies a block of a part, and returns it in fp32."""
    o_rows = batches.to(tl.int64) * stride_batch + positions.to(tl.int64) * stride_position
    o_cols = heads.to(tl.int64) * stride_head + dims
    x = tl.load(p_part + o_rows[:, None] + o_cols[None, :], mask=mask, other=0.0)
    tl.store(p_out + offsets, x, mask=mask)
    return x.to(tl.float32)


@triton.jit
def _stack(
    p_a, p_b, p_c, p_out, p_sums, num_rows, length, num_cols, head_dim,
    a_batch, a_position, a_head, b_batch, b_position, b_head, c_batch, c_position, c_head,
    PARTS: tl.constexpr, HEADS_FIRST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    m_cols = cols < num_cols
    heads, dims = cols // head_dim, cols % head_dim
    # The columns of the first part in the matrix, and the distance to those of the next part.
    o_cols = heads * (PARTS * head_dim) + dims if HEADS_FIRST else cols
    next_part = head_dim if HEADS_FIRST else num_cols
    sums_a = tl.zeros([ROWS, COLS], tl.float32)
    sums_b = tl.zeros([ROWS, COLS], tl.float32)
    sums_c = tl.zeros([ROWS, COLS], tl.float32)
    for first_row in range(tl.program_id(1) * ROWS, num_rows, tl.num_programs(1) * ROWS):
        rows = first_row + tl.arange(0, ROWS)
        mask = (rows < num_rows)[:, None] & m_cols[None, :]
        batches, positions = rows // length, rows % length
        offsets = rows.to(tl.int64)[:, None] * (PARTS * num_cols) + o_cols[None, :]
        sums_a += _copy_block(
            p_a, p_out, batches, positions, heads, dims, offsets, mask, a_batch, a_position, a_head
        )
        sums_b += _copy_block(
            p_b,
            p_out + next_part,
            batches,
            positions,
            heads,
            dims,
            offsets,
            mask,
            b_batch,
            b_position,
            b_head,
        )
        if PARTS == 3:
            sums_c += _copy_block(
                p_c, p_out + 2 * next_part, batches, positions, heads, dims, offsets, mask,
                c_batch, c_position, c_head,
            )  # fmt: skip
    p_sums += tl.program_id(1).to(tl.int64) * (PARTS * num_cols)
    tl.store(p_sums + o_cols, tl.sum(sums_a, axis=0), mask=m_cols)
    tl.store(p_sums + next_part + o_cols, tl.sum(sums_b, axis=0), mask=m_cols)
    if PARTS == 3:
        tl.store(p_sums + 2 * next_part + o_cols, tl.sum(sums_c, axis=0), mask=m_cols)


def launch_stack(
    parts: Sequence[Tensor], heads_first: bool = False, sums_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Copies the parts to one matrix, and sums its columns.

    Args:
        parts: two or three tensors of one dtype and of shape (batch, length, heads, head_dim), with any
            strides.
        heads_first: whether a row of the matrix has the parts of each head one after another, not the heads
            of each part.
        sums_dtype: dtype of the sums. Default: the parts'.

    Returns:
        The matrix, of shape (batch * length, parts * heads * head_dim), and the sums of its columns.
    """
    batch, length, heads, head_dim = parts[0].shape
    num_rows, num_cols = batch * length, heads * head_dim
    config = choose(num_cols)
    row_blocks, col_blocks = cdiv(num_rows, config.blocks["ROWS"]), cdiv(num_cols, config.blocks["COLS"])
    programs = min(row_blocks, num_partial_sums(num_rows, col_blocks, parts[0].device))
    matrix = parts[0].new_empty(num_rows, len(parts) * num_cols)
    sums = matrix.new_empty(programs, len(parts) * num_cols, dtype=torch.float32)
    dense = [part if part.stride(-1) == 1 else part.contiguous() for part in parts]
    # The kernel does not access an absent part.
    dense += dense[:1] * (MAX_PARTS - len(parts))
    strides = [stride for part in dense for stride in part.stride()[:-1]]
    sizes = (num_rows, length, num_cols, head_dim)
    constants = {"PARTS": len(parts), "HEADS_FIRST": heads_first}
    launch(_stack, (col_blocks, programs), config, *dense, matrix, sums, *sizes, *strides, **constants)
    (total,) = launch_partial_sums([sums], [sums_dtype or matrix.dtype])
    assert total is not None
    return matrix, total
