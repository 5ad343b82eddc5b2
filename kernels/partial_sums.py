"""The addition of the partial sums that programs of other kernels write, in one launch.

Each program of a kernel that sums columns writes one row of a matrix of partial sums, in fp32. One launch
adds the rows of up to three such matrices, and rounds each result to its own dtype::

    partials   of dweight, dbias, sums    fp32, shape (programs, columns)
    results    dweight, dbias, sums       shape (columns,), each in its own dtype

The order of the additions depends on the shape alone, so runs repeat. Memory traffic: 4 bytes per partial sum
are read. PyTorch reads the same in one launch per matrix, and casts each result in another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels.launch import Config, cdiv, launch

MAX_MATRICES = 3
CONFIG = Config({"ROWS": 64, "COLS": 32})


@triton.jit
def _add_rows(p_partials, p_y, first_col, num_partials, num_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    o_cols = first_col + tl.arange(0, COLS)
    m_cols = o_cols < num_cols
    b_sums = tl.zeros([ROWS, COLS], tl.float32)
    for first_row in range(0, num_partials, ROWS):
        o_rows = first_row + tl.arange(0, ROWS)
        mask = (o_rows < num_partials)[:, None] & m_cols[None, :]
        offsets = o_rows.to(tl.int64)[:, None] * num_cols + o_cols[None, :]
        b_sums += tl.load(p_partials + offsets, mask=mask, other=0.0)
    tl.store(p_y + o_cols, tl.sum(b_sums, axis=0).to(p_y.dtype.element_ty), mask=m_cols)


# How many programs there are depends on the number of rows, for which no kernel should be compiled anew.
@triton.jit(do_not_specialize=["num_partials"])
def _add_partials(
    p_a, p_b, p_c, p_y_a, p_y_b, p_y_c, num_partials, num_cols,
    COUNT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    col_blocks = tl.cdiv(num_cols, COLS)
    first_col = tl.program_id(0) % col_blocks * COLS
    which = tl.program_id(0) // col_blocks
    if which == 0:
        _add_rows(p_a, p_y_a, first_col, num_partials, num_cols, ROWS, COLS)
    if COUNT > 1 and which == 1:
        _add_rows(p_b, p_y_b, first_col, num_partials, num_cols, ROWS, COLS)
    if COUNT > 2 and which == 2:
        _add_rows(p_c, p_y_c, first_col, num_partials, num_cols, ROWS, COLS)


def launch_partial_sums(
    partials: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]
) -> list[Tensor | None]:
    """Adds the rows of up to `MAX_MATRICES` matrices of partial sums.

    Args:
        partials: contiguous fp32 tensors of one shape (programs, columns); None for absent ones.
        dtypes: the dtype of each result; not read where the matrix is absent. None means fp32.

    Returns:
        The sums over the programs, of shape (columns,) each; None for absent matrices.
    """
    pairs = zip(partials, dtypes, strict=True)
    given = [(t, t.new_empty(t.shape[1], dtype=d or torch.float32)) for t, d in pairs if t is not None]
    if given:
        num_partials, num_cols = given[0][0].shape
        # The kernel does not access absent tensors; the first matrix is passed in their place.
        absent = [given[0][0]] * (MAX_MATRICES - len(given))
        matrices, results = ([*tensors, *absent] for tensors in zip(*given, strict=True))
        grid = (cdiv(num_cols, CONFIG.blocks["COLS"]) * len(given),)
        launch(_add_partials, grid, CONFIG, *matrices, *results, num_partials, num_cols, COUNT=len(given))
    remaining = iter(given)
    return [None if t is None else next(remaining)[1] for t in partials]
