"""Softmax cross-entropy: the loss and its gradient in one pass over the logits, in place if wanted.

For a row x of C logits with target t and label smoothing e, p = softmax(x) (online softmax, arXiv 1805.02867;
label smoothing, arXiv 1512.00567)::

    loss       log(sum_j exp(x_j - max)) - (1 - e) (x_t - max) - e mean_j(x_j - max)
    gradient   (p_j - (1 - e) [j = t] - e / C) scale,   scale 1, or 1 / how many targets are not ignored

A row that fits one block stays in registers between the two sweeps: the first finds max and sum, the second
writes the gradient, over the logits or beside them; the target's own element is written once more after it. A
longer row is read twice: the second sweep runs backwards, so that it begins with what the cache still holds.
The sum alone is in fp64: many small terms beside a large one lose digits of p that PyTorch keeps.

Bytes per element of itemsize i: i read (2 i for rows over 32768 logits), i written. Where no gradient is
needed i read, none written. In the backward none if the incoming gradient is 1, else i read, i written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels import reference
from gpipe_fast.kernels.launch import Config, Variant, cdiv, launch, rows_of, runs_kernels, tuned
from gpipe_fast.kernels.losses import check, check_reduction, reduced, scale_of
from gpipe_fast.kernels.made_gradient import rows_in_place, scaled, with_made_gradient

# By how many logits a row has: the first that is wide enough. Those with ROWS hold whole rows.
CONFIGS = {
    64: Config({"ROWS": 16, "COLS": 64}),
    512: Config({"ROWS": 4, "COLS": 512}),
    2048: Config({"ROWS": 1, "COLS": 2048}),
    8192: Config({"ROWS": 1, "COLS": 8192}, num_warps=8),
    32768: Config({"ROWS": 1, "COLS": 32768}, num_warps=16),
    1 << 62: Config({"COLS": 2048}, num_warps=8),
}


def choose(num_cols: int) -> Config:
    """The configuration for rows of so many logits."""
    widest = next(width for width in CONFIGS if num_cols <= width)
    return tuned("cross_entropy", f"cols<={widest}", CONFIGS[widest])


@triton.jit
def _whole_rows(
    p_logits, p_gradient, p_target, p_scale, p_losses,
    num_rows, num_cols, stride, gradient_stride, rows_written, ignore_index, smoothing,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    o_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_cols = tl.arange(0, COLS)
    m_rows = o_rows < num_rows
    mask = m_rows[:, None] & (o_cols < num_cols)[None, :]
    b_target = tl.load(p_target + o_rows, mask=m_rows, other=0)
    ignored = b_target == ignore_index
    # An unknown target makes its row NaN.
    known = (b_target >= 0) & (b_target < num_cols)
    starts = o_rows.to(tl.int64) * stride
    x_target = tl.load(p_logits + starts + b_target, mask=m_rows & known, other=float("nan")).to(tl.float32)
    x = tl.load(p_logits + starts[:, None] + o_cols[None, :], mask=mask, other=-float("inf")).to(tl.float32)
    # Every logit has been read before one is overwritten.
    tl.debug_barrier()
    top = tl.maximum(tl.max(x, axis=1), -3.4028234663852886e38)
    shifted = x - top[:, None]
    rest = tl.zeros([ROWS], tl.float32)
    if smoothing > 0.0:
        rest = smoothing * (tl.sum(tl.where(mask, shifted, 0.0), axis=1) / num_cols)
    powers = tl.exp(shifted)
    total = tl.sum(powers.to(tl.float64), axis=1)
    loss = tl.log(total.to(tl.float32)) - (1.0 - smoothing) * (x_target - top) - rest
    tl.store(p_losses + o_rows, tl.where(ignored, 0.0, loss), mask=m_rows)
    # All classes as if none were the target, whose own is written after them.
    scale = tl.where(known, tl.load(p_scale), float("nan"))
    inverse, spread = (1.0 / total).to(tl.float32), smoothing / num_cols
    gradient = (powers * inverse[:, None] - spread) * scale[:, None]
    gradient = tl.where(ignored[:, None], 0.0, gradient)
    starts = o_rows.to(tl.int64) * gradient_stride
    m_written = o_rows < rows_written
    p_out = p_gradient + starts[:, None] + o_cols[None, :]
    tl.store(p_out, gradient.to(p_gradient.dtype.element_ty), mask=mask & m_written[:, None])
    tl.debug_barrier()
    own = (tl.exp(x_target - top) * inverse - spread - (1.0 - smoothing)) * scale
    p_own = p_gradient + starts + b_target
    tl.store(p_own, own.to(p_gradient.dtype.element_ty), mask=m_written & known & (b_target != ignore_index))


@triton.jit
def _long_rows(
    p_logits, p_gradient, p_target, p_scale, p_losses,
    num_rows, num_cols, stride, gradient_stride, rows_written, ignore_index, smoothing,
    COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    o_block = tl.arange(0, COLS)
    p_row = p_logits + row.to(tl.int64) * stride
    p_out = p_gradient + row.to(tl.int64) * gradient_stride
    target = tl.load(p_target + row)
    ignored = target == ignore_index
    known = (target >= 0) & (target < num_cols)
    x_target = tl.load(p_row + target, mask=known, other=float("nan")).to(tl.float32)
    top = -3.4028234663852886e38
    b_total = tl.zeros([COLS], tl.float64)
    sum_shifted = 0.0
    for first in range(0, num_cols, COLS):
        mask = first + o_block < num_cols
        x = tl.load(p_row + first + o_block, mask=mask, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, axis=0))
        if smoothing > 0.0:
            # The logits before, of which there are none at first, were less a lower maximum.
            moved = tl.where(first > 0, first * (top - higher), 0.0)
            sum_shifted += moved + tl.sum(tl.where(mask, x - higher, 0.0), axis=0)
        b_total = b_total * tl.exp(top - higher).to(tl.float64) + tl.exp(x - higher).to(tl.float64)
        top = higher
    total = tl.sum(b_total, axis=0)
    loss = (
        tl.log(total.to(tl.float32))
        - (1.0 - smoothing) * (x_target - top)
        - smoothing * (sum_shifted / num_cols)
    )
    tl.store(p_losses + row, tl.where(ignored, 0.0, loss))
    tl.debug_barrier()
    if row < rows_written:
        scale = tl.where(known, tl.load(p_scale), float("nan"))
        inverse, spread = (1.0 / total).to(tl.float32), smoothing / num_cols
        last = (num_cols - 1) // COLS * COLS
        for back in range(0, num_cols, COLS):
            o_cols = last - back + o_block
            mask = o_cols < num_cols
            x = tl.load(p_row + o_cols, mask=mask, other=-float("inf")).to(tl.float32)
            gradient = tl.where(ignored, 0.0, (tl.exp(x - top) * inverse - spread) * scale)
            tl.store(p_out + o_cols, gradient.to(p_gradient.dtype.element_ty), mask=mask)
        tl.debug_barrier()
        own = (tl.exp(x_target - top) * inverse - spread - (1.0 - smoothing)) * scale
        tl.store(p_out + target, own.to(p_gradient.dtype.element_ty), mask=known & (target != ignore_index))


def launch_rows(
    logits: Tensor,
    gradient: Tensor | None,
    target: Tensor,
    scale: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """The loss of each row, in fp32.

    Args:
        logits: of shape (rows, classes), elements of a row side by side.
        gradient: of the same shape, written; may be the logits. None if none is needed.
        target: of shape (rows,), contiguous.
        scale: one element in fp32, of the gradient.
        ignore_index: target of rows whose loss and gradient are 0.
        label_smoothing: share of the uniform distribution.
    """
    num_rows, num_cols = logits.shape
    config = choose(num_cols)
    losses = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    out = logits if gradient is None else gradient
    kernel = _whole_rows if "ROWS" in config.blocks else _long_rows
    grid = (cdiv(num_rows, config.blocks.get("ROWS", 1)),)
    sizes = (num_rows, num_cols, logits.stride(0), out.stride(0), 0 if gradient is None else num_rows)
    arguments = (logits, out, target, scale, losses, *sizes, ignore_index, float(label_smoothing))
    launch(kernel, grid, config, *arguments)
    return losses


def variants() -> dict[str, Variant]:
    """Every configuration, in the forms that are checked without a GPU."""
    found = {}
    for dtype in ("fp32", "bf16"):
        for config in CONFIGS.values():
            kernel = _whole_rows if "ROWS" in config.blocks else _long_rows
            tensors = dict.fromkeys(("p_logits", "p_gradient"), f"*{dtype}") | {"p_target": "*i64"}
            tensors |= dict.fromkeys(("p_scale", "p_losses"), "*fp32")
            strides = dict.fromkeys(("num_cols", "stride", "gradient_stride"), "i32")
            others = dict.fromkeys(("num_rows", "rows_written", "ignore_index"), "i32") | {
                "smoothing": "fp32"
            }
            signature = tensors | strides | others
            variant = Variant(kernel, signature, {}, config, (*tensors, *strides))
            found[f"cross_entropy forward, {dtype}, {config}"] = variant
    return found


def rows_with_gradient(
    logits: Tensor,
    gradient: Tensor | None,
    target: Tensor,
    scale: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """The same by kernel, or by the reference."""
    if runs_kernels(logits, target):
        return launch_rows(logits, gradient, target, scale, ignore_index, label_smoothing)
    losses, made = reference.cross_entropy(logits, target, scale, ignore_index, label_smoothing)
    if gradient is not None:
        gradient.copy_(made)
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
    rows, scale = rows_of(logits), scale_of(target, ignore_index, reduction)
    gradient = torch.empty_like(rows) if with_gradient else None
    losses = rows_with_gradient(rows, gradient, target.reshape(-1), scale, ignore_index, label_smoothing)
    made = logits.new_empty(0) if gradient is None else gradient.view(logits.shape)
    return reduced(losses, target, ignore_index, reduction), made


@torch.library.triton_op("gpipe_fast::cross_entropy_", mutates_args={"logits"})
def _cross_entropy_(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, reduction: str
) -> Tensor:
    in_place = rows_in_place(logits)
    rows, scale = rows_of(logits) if in_place is None else in_place, scale_of(target, ignore_index, reduction)
    losses = rows_with_gradient(rows, rows, target.reshape(-1), scale, ignore_index, label_smoothing)
    if in_place is None:
        logits.copy_(rows.view(logits.shape))
    return reduced(losses, target, ignore_index, reduction)


def _setup(ctx, inputs, output):
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _differentiate(ctx, g, _):
    return scaled(ctx.saved_tensors[0], g), None, None, None, None, None


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
    """Softmax cross-entropy whose forward makes the gradient too; the backward only scales it.

    As `torch.nn.functional.cross_entropy` with class indices, but that classes are the last dimension and
    that the loss is in fp32. The gradient is rounded to the dtype of the logits before it is scaled; with
    fp16 and a loss scale, small gradients are lost that PyTorch, which scales first, would keep.

    A target that is neither a class nor ``ignore_index`` is an IndexError on the CPU. On a GPU nothing waits
    for the targets: loss and gradient of that row become NaN, and so does the mean or the sum.

    Args:
        logits: of shape (..., classes); fp32, fp16 or bf16. Computed in fp32.
        target: of the shape of logits without its last dimension; int64.
        ignore_index: target of rows that do not count: their gradient is 0.
        label_smoothing: share of the target that all classes have alike, from 0 to 1.
        reduction: 'mean' over the targets that are not ignored (NaN if all are), 'sum' or 'none'.
        inplace: where a gradient is needed, write it over the logits, WHICH ARE DESTROYED: whatever reads
            them later reads their gradient. What autograd saved of them fails in its backward.

    Returns:
        The loss in fp32: of shape (), or of the target's for 'none'.

    Raises:
        ValueError: shapes, dtypes, devices or options do not fit, or logits to be overwritten are a leaf.
        IndexError: a target is out of range, on the CPU.
    """
    check(logits, target, logits.shape, label_smoothing)
    check_reduction(reduction, ("mean", "sum", "none"))
    differentiated = torch.is_grad_enabled() and logits.requires_grad
    options = (ignore_index, float(label_smoothing), reduction)
    if not (inplace and differentiated):
        loss: Tensor = _cross_entropy(logits, target, *options, differentiated)[0]
        return loss
    if logits.is_leaf:
        raise ValueError("logits that are a leaf of autograd would be overwritten with their gradient")
    with torch.no_grad():
        loss = _cross_entropy_(logits.detach(), target, *options)
    return with_made_gradient(logits, loss)
