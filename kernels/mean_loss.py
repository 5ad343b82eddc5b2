"""The last step of a loss with class indices, in one program: the sum of the losses of rows, or their mean.

PyTorch compares, counts, sums, divides and casts in launches of their own. One program reads all rows: there
are few compared with the logits. The order of the additions depends on the number of rows alone, so runs
repeat.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels.launch import Config, launch

CONFIG = Config({"SIZE": 2048}, num_warps=8)


# A kernel should not be compiled anew for each number of rows.
@triton.jit(do_not_specialize=["num_rows", "ignore_index"])
def _mean_loss(p_x, p_target, p_y, num_rows, ignore_index, DIVIDE: tl.constexpr, SIZE: tl.constexpr):
    b_sum = tl.zeros([SIZE], tl.float32)
    b_count = tl.zeros([SIZE], tl.int32)
    for first_row in range(0, num_rows, SIZE):
        o_rows = first_row + tl.arange(0, SIZE)
        mask = o_rows < num_rows
        b_sum += tl.load(p_x + o_rows, mask=mask, other=0.0).to(tl.float32)
        if DIVIDE:
            b_target = tl.load(p_target + o_rows, mask=mask, other=0)
            b_count += (mask & (b_target != ignore_index)).to(tl.int32)
    y = tl.sum(b_sum, axis=0)
    if DIVIDE:
        y = tl.div_rn(y, tl.sum(b_count, axis=0).to(tl.float32))
    tl.store(p_y, y.to(p_y.dtype.element_ty))


def launch_loss(losses: Tensor, target: Tensor, ignore_index: int, mean: bool, dtype: torch.dtype) -> Tensor:
    """Returns the sum or the mean of losses, a scalar.

    Args:
        losses: a contiguous fp32 tensor of shape (rows,), 0 where the target is ignored.
        target: a contiguous int64 tensor of shape (rows,).
        ignore_index: the target of rows that a mean does not count.
        mean: whether to divide by the number of targets that are not ignored.
        dtype: dtype of the result.
    """
    y = losses.new_empty((), dtype=dtype)
    launch(_mean_loss, (1,), CONFIG, losses, target, y, target.shape[0], ignore_index, DIVIDE=mean)
    return y
