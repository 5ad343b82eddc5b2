"""Softmax cross-entropy: the loss and its gradient in one pass over the logits, optionally in place.

For a row x of C logits with target t and label smoothing e, p = softmax(x) (online softmax, arXiv 1805.02867;
label smoothing, arXiv 1512.00567)::

    loss       log(sum_j exp(x_j - max)) - (1 - e) (x_t - max) - e mean_j(x_j - max)
    gradient   (p_j - (1 - e) [j = t] - e / C) scale,   scale = 1, or 1 / number of targets not ignored

There are two sweeps over a row. The first computes the maximum and the sum, the second writes the gradient,
to the logits or to a separate tensor, and then overwrites the element of the target. A row that fits into one
block stays in registers between the sweeps. A longer row is read twice: the second sweep runs backwards, to
begin with the logits that the cache still holds. Only the sum is in fp64: in fp32, many small terms added to
a large one would lose digits of p that PyTorch keeps.

Memory traffic per element of itemsize i: the forward reads i bytes (2 i for rows over 32768 logits) and
writes i, or nothing if no gradient is needed. The backward moves nothing if the incoming gradient is 1;
otherwise it reads i and writes i.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels import reference
from gpipe_fast.kernels.launch import Config, cdiv, choose, flatten_rows, launch, uses_kernels
from gpipe_fast.kernels.losses import check, check_reduction, reduce_losses, reduction_scale
from gpipe_fast.kernels.precomputed_gradient import scale_gradient, view_rows, with_precomputed_gradient

# Configurations by the maximum number of logits of a row; the first entry that is wide enough applies. A
# configuration with ROWS keeps whole rows in registers.
CONFIGS = {
    64: Config({"ROWS": 16, "COLS": 64}),
    512: Config({"ROWS": 2, "COLS": 512}),
    2048: Config({"ROWS": 1, "COLS": 2048}),
    8192: Config({"ROWS": 1, "COLS": 8192}, num_warps=8),
    32768: Config({"ROWS": 1, "COLS": 32768}, num_warps=16),
    1 << 62: Config({"COLS": 2048}, num_warps=8),
}


@triton.jit
def _whole_rows(
    p_logits, p_gradient, p_target, p_scale, p_losses,
    num_rows, num_cols, stride, gradient_stride, scale_stride, ignore_index, smoothing,
    WITH_LOSSES: tl.constexpr, WITH_GRADIENT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    o_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_cols = tl.arange(0, COLS)
    m_rows = o_rows < num_rows
    mask = m_rows[:, None] & (o_cols < num_cols)[None, :]
    b_target = tl.load(p_target + o_rows, mask=m_rows, other=0)
    ignored = b_target == ignore_index
    smoothing = tl.cast(smoothing, tl.float32)  # Inductor passes numbers as fp64
    # The loss and the gradient of a row with an out-of-range target are NaN.
    in_range = (b_target >= 0) & (b_target < num_cols)
    starts = o_rows.to(tl.int64) * stride
    x_target = tl.load(p_logits + starts + b_target, mask=m_rows & in_range, other=float("nan")).to(
        tl.float32
    )
    x = tl.load(p_logits + starts[:, None] + o_cols[None, :], mask=mask, other=-float("inf")).to(tl.float32)
    # All logits must be read before any is overwritten.
    tl.debug_barrier()
    row_max = tl.maximum(tl.max(x, axis=1), -3.4028234663852886e38)
    shifted = x - row_max[:, None]
    smoothing_term = tl.zeros([ROWS], tl.float32)
    if WITH_LOSSES and smoothing > 0.0:
        smoothing_term = smoothing * (tl.sum(tl.where(mask, shifted, 0.0), axis=1) / num_cols)
    exponentials = tl.exp(shifted)
    total = tl.sum(exponentials.to(tl.float64), axis=1)
    if WITH_LOSSES:
        loss = tl.log(total.to(tl.float32)) - (1.0 - smoothing) * (x_target - row_max) - smoothing_term
        loss = tl.where(ignored, 0.0, loss).to(p_losses.dtype.element_ty)
        tl.store(p_losses + o_rows, loss, mask=m_rows)
    if WITH_GRADIENT:
        # This is the gradient of the classes other than the target, whose element is overwritten below.
        scale = tl.load(p_scale + o_rows * scale_stride, mask=m_rows, other=0.0)
        scale = tl.where(in_range, scale, float("nan"))
        inverse, spread = (1.0 / total).to(tl.float32), smoothing / num_cols
        gradient = (exponentials * inverse[:, None] - spread) * scale[:, None]
        gradient = tl.where(ignored[:, None], 0.0, gradient)
        starts = o_rows.to(tl.int64) * gradient_stride
        p_out = p_gradient + starts[:, None] + o_cols[None, :]
        tl.store(p_out, gradient.to(p_gradient.dtype.element_ty), mask=mask)
        tl.debug_barrier()
        target_gradient = (tl.exp(x_target - row_max) * inverse - spread - (1.0 - smoothing)) * scale
        p_target_gradient = p_gradient + starts + b_target
        tl.store(
            p_target_gradient,
            target_gradient.to(p_gradient.dtype.element_ty),
            mask=m_rows & in_range & (b_target != ignore_index),
        )


@triton.jit
def _long_rows(
    p_logits, p_gradient, p_target, p_scale, p_losses,
    num_rows, num_cols, stride, gradient_stride, scale_stride, ignore_index, smoothing,
    WITH_LOSSES: tl.constexpr, WITH_GRADIENT: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    o_block = tl.arange(0, COLS)
    p_row = p_logits + row.to(tl.int64) * stride
    p_out = p_gradient + row.to(tl.int64) * gradient_stride
    target = tl.load(p_target + row)
    ignored = target == ignore_index
    in_range = (target >= 0) & (target < num_cols)
    x_target = tl.load(p_row + target, mask=in_range, other=float("nan")).to(tl.float32)
    row_max = -3.4028234663852886e38
    smoothing = tl.cast(smoothing, tl.float32)  # Inductor passes numbers as fp64
    b_total = tl.zeros([COLS], tl.float64)
    sum_shifted = 0.0
    for first in range(0, num_cols, COLS):
        mask = first + o_block < num_cols
        x = tl.load(p_row + first + o_block, mask=mask, other=-float("inf")).to(tl.float32)
        new_max = tl.maximum(row_max, tl.max(x, axis=0))
        if WITH_LOSSES and smoothing > 0.0:
            # Corrects the earlier terms, which were shifted by a lower maximum. There are none at first.
            shift_correction = tl.where(first > 0, first * (row_max - new_max), 0.0)
            sum_shifted += shift_correction + tl.sum(tl.where(mask, x - new_max, 0.0), axis=0)
        b_total = b_total * tl.exp(row_max - new_max).to(tl.float64) + tl.exp(x - new_max).to(tl.float64)
        row_max = new_max
    total = tl.sum(b_total, axis=0)
    if WITH_LOSSES:
        loss = (
            tl.log(total.to(tl.float32))
            - (1.0 - smoothing) * (x_target - row_max)
            - smoothing * (sum_shifted / num_cols)
        )
        tl.store(p_losses + row, tl.where(ignored, 0.0, loss).to(p_losses.dtype.element_ty))
    if WITH_GRADIENT:
        tl.debug_barrier()
        scale = tl.where(in_range, tl.load(p_scale + row * scale_stride), float("nan"))
        inverse, spread = (1.0 / total).to(tl.float32), smoothing / num_cols
        last = (num_cols - 1) // COLS * COLS
        for back in range(0, num_cols, COLS):
            o_cols = last - back + o_block
            mask = o_cols < num_cols
            x = tl.load(p_row + o_cols, mask=mask, other=-float("inf")).to(tl.float32)
            gradient = tl.where(ignored, 0.0, (tl.exp(x - row_max) * inverse - spread) * scale)
            tl.store(p_out + o_cols, gradient.to(p_gradient.dtype.element_ty), mask=mask)
        tl.debug_barrier()
        target_gradient = (tl.exp(x_target - row_max) * inverse - spread - (1.0 - smoothing)) * scale
        tl.store(
            p_out + target,
            target_gradient.to(p_gradient.dtype.element_ty),
            mask=in_range & (target != ignore_index),
        )


def launch_losses(
    logits: Tensor, target: Tensor, ignore_index: int = -100, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns the loss of each row in a dtype, shape (rows,). The arguments are as in `launch_gradient`."""
    rows, losses = _rows_with_unit_stride(logits), logits.new_empty(logits.shape[0], dtype=dtype)
    _launch(rows, None, target, None, losses, ignore_index)
    return losses


def launch_gradient(
    logits: Tensor,
    target: Tensor,
    scale: Tensor,
    ignore_index: int = -100,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns the gradient of the sum of ``scale`` times the losses, contiguous in the shape of the logits.

    Args:
        logits: a tensor of shape (rows, classes).
        target: a contiguous int64 tensor of shape (rows,).
        scale: the incoming gradient, divided by the number of targets for a mean: contiguous, in fp32, one
            element or one for each row.
        ignore_index: the target of rows whose loss and gradient are 0.
        dtype: dtype of the gradient. Default: the dtype of the logits.
    """
    rows = _rows_with_unit_stride(logits)
    gradient = logits.new_empty(logits.shape, dtype=dtype or logits.dtype)
    _launch(rows, gradient, target, scale, None, ignore_index)
    return gradient


def _launch(
    logits: Tensor, gradient: Tensor | None, target: Tensor, scale: Tensor | None, losses: Tensor | None,
    ignore_index: int, label_smoothing: float = 0.0,
) -> None:  # fmt: skip
    """Writes the results that are not None. The kernel does not access absent tensors."""
    num_rows, num_cols = logits.shape
    config = choose(CONFIGS, num_cols)
    kernel = _whole_rows if "ROWS" in config.blocks else _long_rows
    grid = (cdiv(num_rows, config.blocks.get("ROWS", 1)),)
    out = logits if gradient is None else gradient
    given = losses if scale is None else scale
    tensors = (logits, out, target, given, given if losses is None else losses)
    scale_stride = 0 if scale is None or scale.numel() == 1 else 1
    sizes = (num_rows, num_cols, logits.stride(0), out.stride(0), scale_stride)
    constants = {"WITH_LOSSES": losses is not None, "WITH_GRADIENT": gradient is not None}
    launch(kernel, grid, config, *tensors, *sizes, ignore_index, float(label_smoothing), **constants)


def _rows_with_unit_stride(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def row_losses_and_gradient(
    logits: Tensor,
    gradient: Tensor | None,
    target: Tensor,
    scale: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """Returns the loss of each row, in fp32, and writes the gradient, by the kernel or by the reference.

    Args:
        logits: a tensor of shape (rows, classes) whose last dimension has stride 1.
        gradient: a tensor of the same shape that receives the gradient; may be the logits. None if not
            needed.
        target: a contiguous tensor of shape (rows,).
        scale: the factor of the gradient, one element in fp32.
        ignore_index: the target of rows whose loss and gradient are 0.
        label_smoothing: the weight of the uniform distribution in the target.
    """
    if uses_kernels(logits, target):
        own = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        _launch(logits, gradient, target, scale, own, ignore_index, label_smoothing)
        return own
    losses, computed = reference.cross_entropy(logits, target, scale, ignore_index, label_smoothing)
    if gradient is not None:
        gradient.copy_(computed)
    return losses


@torch.library.triton_op("gpipe_fast::cross_entropy", mutates_args={})
def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    with_gradient: bool,
) -> tuple[Tensor, Tensor]:
    rows, scale = flatten_rows(logits), reduction_scale(target, ignore_index, reduction)
    gradient = torch.empty_like(rows) if with_gradient else None
    losses = row_losses_and_gradient(rows, gradient, target.reshape(-1), scale, ignore_index, label_smoothing)
    made = logits.new_empty(0) if gradient is None else gradient.view(logits.shape)
    return reduce_losses(losses, target, ignore_index, reduction), made


@torch.library.triton_op("gpipe_fast::cross_entropy_", mutates_args={"logits"})
def _cross_entropy_(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, reduction: str
) -> Tensor:
    in_place = view_rows(logits)
    rows, scale = (
        flatten_rows(logits) if in_place is None else in_place,
        reduction_scale(target, ignore_index, reduction),
    )
    losses = row_losses_and_gradient(rows, rows, target.reshape(-1), scale, ignore_index, label_smoothing)
    if in_place is None:
        logits.copy_(rows.view(logits.shape))
    return reduce_losses(losses, target, ignore_index, reduction)


def _setup(ctx, inputs, output):
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _differentiate(ctx, g, _):
    return scale_gradient(ctx.saved_tensors[0], g), None, None, None, None, None


_cross_entropy.register_autograd(_differentiate, setup_context=_setup)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """Computes softmax cross-entropy. The forward also computes the gradient; the backward only scales it.

    Equals `torch.nn.functional.cross_entropy` with class indices, except that the classes are the last
    dimension and that the loss is in fp32. The gradient is rounded to the dtype of the logits before it is
    scaled: with fp16 and a loss scale it loses small gradients that PyTorch, which scales first, keeps.

    A target that is neither a class nor ``ignore_index`` raises IndexError on the CPU. On a GPU the targets
    are not checked, which would synchronize: the loss and the gradient of that row are NaN, and so is the
    mean or sum.

    Args:
        logits: a tensor of shape (..., classes); fp32, fp16 or bf16. Arithmetic is in fp32.
        target: an int64 tensor with the shape of the logits without the last dimension.
        ignore_index: the target of rows that are excluded from the loss; their gradient is 0.
        label_smoothing: the weight of the uniform distribution in the target, from 0 to 1.
        reduction: 'mean' over the targets that are not ignored (NaN if all are), 'sum' or 'none'.
        inplace: if a gradient is needed, writes it over the logits, WHICH ARE DESTROYED: any later read of
            the logits sees the gradient. The backward of an operation that saved the logits raises an error.

    Returns:
        The loss in fp32, of shape (), or of the target's shape for 'none'.

    Raises:
        ValueError: shapes, dtypes, devices or options are invalid, or ``inplace`` logits are a leaf.
        IndexError: a target is out of range (only on the CPU).
    """
    check(logits, target, logits.shape, label_smoothing)
    check_reduction(reduction, ("mean", "sum", "none"))
    differentiated = torch.is_grad_enabled() and logits.requires_grad
    options = (ignore_index, float(label_smoothing), reduction)
    if not (inplace and differentiated):
        loss: Tensor = _cross_entropy(logits, target, *options, differentiated)[0]
        return loss
    if logits.is_leaf:
        raise ValueError(
            "inplace=True would overwrite the logits, but they are a leaf tensor of shape "
            f"{list(logits.shape)}; pass inplace=False, or logits that an operation computed"
        )
    with torch.no_grad():
        loss = _cross_entropy_(logits.detach(), target, *options)
    return with_precomputed_gradient(logits, loss)
