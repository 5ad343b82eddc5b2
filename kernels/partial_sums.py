"""The addition of the partial sums that programs of other kernels write.

Each program of a kernel that sums columns writes one row of a matrix of partial sums, in fp32. A launch adds
the rows of such a matrix, and rounds the result to its dtype. The order of the additions depends on the shape
alone, so runs repeat. Memory traffic: 4 bytes per partial sum are read. PyTorch casts the result in another
launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels.launch import Config, cdiv, launch

CONFIG = Config({"ROWS": 64, "COLS": 32})


# How many programs there are depends on the number of rows, for which no kernel should be compiled anew.
@triton.jit(do_not_specialize=["num_partials"])
def _add_partials(p_partials, p_y, num_partials, num_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    o_cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    m_cols = o_cols < num_cols
    b_sums = tl.zeros([ROWS, COLS], tl.float32)
    for first_row in range(0, num_partials, ROWS):
        o_rows = first_row + tl.arange(0, ROWS)
        mask = (o_rows < num_partials)[:, None] & m_cols[None, :]
        offsets = o_rows.to(tl.int64)[:, None] * num_cols + o_cols[None, :]
        b_sums += tl.load(p_partials + offsets, mask=mask, other=0.0)
    tl.store(p_y + o_cols, tl.sum(b_sums, axis=0).to(p_y.dtype.element_ty), mask=m_cols)


def launch_partial_sums(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Adds the rows of a matrix of partial sums.

    Args:
        partials: a contiguous fp32 tensor of shape (programs, columns).
        dtype: the dtype of the result.

    Returns:
        The sums over the programs, of shape (columns,).
    """
    num_partials, num_cols = partials.shape
    y = partials.new_empty(num_cols, dtype=dtype)
    launch(
        _add_partials, (cdiv(num_cols, CONFIG.blocks["COLS"]),), CONFIG, partials, y, num_partials, num_cols
    )
    return y
