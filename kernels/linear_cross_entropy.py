"""The last linear layer fused with softmax cross-entropy, in chunks of rows: no full logits are allocated.

For rows x (N, H), weight W (C, H) and bias b, each chunk of rows in turn computes::

    logits = x_c W^T + b      in a buffer that all chunks share
    loss, d                   by cross_entropy.py, d overwrites the logits
    dx_c = d W
    dW += d^T x_c             in fp32, unless there is only one chunk
    db += sum over rows of d  in fp32

The forward computes all gradients; the backward scales them. Each chunk reads W twice and writes dW, and each
chunk after the first reads dW: 2 i C H + 8 C H bytes for 6 rows C H operations, so a chunk should have about
a thousand rows. Besides the results, the buffer takes i rows C bytes, and dW in fp32 takes 4 C H bytes if the
weight is in half precision. The benefit is memory capacity more than memory traffic. CPU tensors are
processed in the same chunks, with the reference of cross_entropy.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpipe_fast.kernels.cross_entropy import row_losses_and_gradient
from gpipe_fast.kernels.launch import cdiv, flatten_rows, next_power_of_2
from gpipe_fast.kernels.losses import check, check_reduction, reduce_losses, reduction_scale
from gpipe_fast.kernels.precomputed_gradient import scale_gradient

# At 1024 rows the product d^T x_c does 256 operations per byte of dW, near the balance of current GPUs.
MIN_CHUNK_ROWS = 1024


def choose_chunk_rows(num_rows: int, num_classes: int, num_features: int) -> int:
    """Returns the number of rows whose logits are as large as x: at least 1024, rounded to a power of two."""
    balanced = cdiv(num_rows * num_features, max(1, num_classes))
    return min(next_power_of_2(max(MIN_CHUNK_ROWS, balanced)), max(1, num_rows))


def chunked_loss_and_gradients(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    chunk_rows: int,
    needs_grad: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Returns the loss and the gradients of x, weight and bias (None if not needed).

    Args:
        x: a tensor of shape (..., features).
        weight: a tensor of shape (classes, features).
        target: a tensor with x's shape without the last dimension.
        bias: a tensor of shape (classes,), or None.
        ignore_index: the target of rows that are excluded from the loss.
        label_smoothing: the weight of the uniform distribution in the target.
        reduction: 'mean' or 'sum'.
        chunk_rows: the number of rows of logits that exist at a time.
        needs_grad: whether the gradients of x, of weight and of bias are needed.
    """
    rows, targets = flatten_rows(x), target.reshape(-1)
    (num_rows, _), num_classes = rows.shape, weight.shape[0]
    scale = reduction_scale(target, ignore_index, reduction)
    dx = torch.empty_like(rows) if needs_grad[0] else None
    dweight = _allocate_dweight(weight, num_rows, num_rows > chunk_rows) if needs_grad[1] else None
    dbias = weight.new_zeros(num_classes, dtype=torch.float32) if needs_grad[2] else None
    buffer = rows.new_empty(min(chunk_rows, num_rows), num_classes)
    losses = []
    for first in range(0, num_rows, chunk_rows):
        chunk = rows[first : first + chunk_rows]
        logits = buffer[: chunk.shape[0]]
        _compute_logits(chunk, weight, bias, logits)
        dlogits = logits if any(needs_grad) else None
        own = targets[first : first + chunk_rows]
        losses.append(row_losses_and_gradient(logits, dlogits, own, scale, ignore_index, label_smoothing))
        if dx is not None:
            torch.mm(logits, weight, out=dx[first : first + chunk_rows])
        if dweight is not None:
            _accumulate(dweight, logits, chunk, first > 0)
        if dbias is not None:
            dbias += logits.sum(0, dtype=torch.float32)
    all_losses = torch.cat(losses) if losses else scale.new_empty(0)
    return (
        reduce_losses(all_losses, target, ignore_index, reduction),
        None if dx is None else dx.view(x.shape),
        None if dweight is None else dweight.to(weight.dtype),
        None if dbias is None or bias is None else dbias.to(bias.dtype),
    )


def _compute_logits(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _allocate_dweight(weight: Tensor, num_rows: int, added: bool) -> Tensor:
    """Allocates the weight's gradient: in fp32 if several chunks are added, zeros if there are no rows."""
    if not num_rows:
        return torch.zeros_like(weight)
    return torch.empty_like(weight, dtype=torch.float32 if added else weight.dtype)


def _accumulate(dweight: Tensor, dlogits: Tensor, x: Tensor, add: bool) -> None:
    """Writes or adds ``dlogits^T x``, accumulated in dweight's dtype whatever the dtype of the factors."""
    if x.is_cuda and x.dtype != dweight.dtype:
        if add:
            torch.addmm(dweight, dlogits.t(), x, out_dtype=dweight.dtype, out=dweight)
        else:
            torch.mm(dlogits.t(), x, out_dtype=dweight.dtype, out=dweight)
        return
    dlogits, x = dlogits.to(dweight.dtype), x.to(dweight.dtype)
    if add:
        dweight.addmm_(dlogits.t(), x)
    else:
        torch.mm(dlogits.t(), x, out=dweight)


@torch.library.triton_op("gpipe_fast::linear_cross_entropy", mutates_args={})
def _linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    chunk_rows: int,
    needs_grad: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = (ignore_index, label_smoothing, reduction, chunk_rows, needs_grad)
    loss, *gradients = chunked_loss_and_gradients(x, weight, target, bias, *options)
    dx, dweight, dbias = (x.new_empty(0) if g is None else g for g in gradients)
    return loss, dx, dweight, dbias


def _setup(ctx, inputs, output):
    ctx.mark_non_differentiable(*output[1:])
    ctx.needs_grad = inputs[-1]
    ctx.save_for_backward(*output[1:])


def _differentiate(ctx, g, *_):
    gradients = [
        scale_gradient(t, g) if need else None
        for t, need in zip(ctx.saved_tensors, ctx.needs_grad, strict=True)
    ]
    dx, dweight, dbias = gradients
    return dx, dweight, None, dbias, None, None, None, None, None


_linear_cross_entropy.register_autograd(_differentiate, setup_context=_setup)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk_rows: int | None = None,
) -> Tensor:
    """Computes ``cross_entropy(x @ weight.T + bias, target)`` without allocating all logits.

    The forward computes the required gradients, one chunk of rows after another; the backward only scales
    them. Logits and their gradient are rounded to x's dtype, as in a linear layer; the gradients of weight
    and bias are accumulated in fp32.

    Out-of-range targets are treated as in `cross_entropy`. On a GPU one such target makes the loss, its row
    of x's gradient, and all of the gradients of weight and bias NaN.

    Args:
        x: a tensor of shape (..., features); fp32, fp16 or bf16.
        weight: a tensor of shape (classes, features) and x's dtype.
        target: an int64 tensor with x's shape without the last dimension.
        bias: a tensor of shape (classes,) and x's dtype, or None.
        ignore_index: the target of rows that are excluded from the loss.
        label_smoothing: the weight of the uniform distribution in the target, from 0 to 1.
        reduction: 'mean' over the targets that are not ignored (NaN if all are), or 'sum'. 'none' is not
            supported: the gradient of the weight sums over rows before the backward scales it.
        chunk_rows: the number of rows of logits that exist at a time. By default a chunk of logits is as
            large as x, but has at least 1024 rows for efficient products; rounded up to a power of two.

    Returns:
        The loss in fp32, of shape ().

    Raises:
        ValueError: shapes, dtypes, devices or options are invalid.
        IndexError: a target is out of range (only on the CPU).
    """
    _check(x, weight, target, bias, label_smoothing, reduction)
    if chunk_rows is None:
        chunk_rows = choose_chunk_rows(target.numel(), *weight.shape)
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
    needs_grad = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias)]
    options = (ignore_index, float(label_smoothing), reduction, chunk_rows, needs_grad)
    loss: Tensor = _linear_cross_entropy(x, weight, target, bias, *options)[0]
    return loss


def _check(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, label_smoothing: float, reduction: str
) -> None:
    check_reduction(reduction, ("mean", "sum"))
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"the weight must be (classes, features) for x (..., features) of shape {list(x.shape)}, "
            f"got {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"the bias must be of shape {list(weight.shape[:1])}, got {list(bias.shape)}")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and (other.dtype, other.device) != (x.dtype, x.device):
            raise ValueError(
                f"the {name} must be {x.dtype} on {x.device} like x, got {other.dtype} on {other.device}"
            )
    check(x, target, torch.Size((*x.shape[:-1], weight.shape[0])), label_smoothing)
