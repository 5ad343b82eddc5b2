"""LayerNorm and RMSNorm as public functions and operators: checks, dispatch and autograd.

The formulas and kernels are in kernels/norms.py.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from gpipe_fast.kernels import norms, reference
from gpipe_fast.kernels.dropout import dropout_add, dropout_add_forward
from gpipe_fast.kernels.launch import uses_kernels
from gpipe_fast.kernels.philox import Draw

# Result of a fused backward: y, then the gradients of x, residual, weight and bias (None for absent inputs).
Gradients = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = ..., bias: Tensor | None = ..., eps: float = ..., residual: None = ...
) -> Tensor: ...


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    residual: Tensor,
    dropout: Draw | None = ...,
) -> tuple[Tensor, Tensor]: ...


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    dropout: Draw | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes LayerNorm over the last dimension of x or of ``residual + dropout(x)`` (arXiv 1607.06450).

    Saves x, or the sum if there is a residual. The backward recomputes the mean and the standard deviation,
    and regenerates the mask.

    Args:
        x: a tensor of shape (..., columns); fp32, fp16 or bf16. Arithmetic is in fp32. PyTorch's operators
            compute fp64.
        weight: a tensor of shape (columns,) and any floating-point dtype, or None for ones.
        bias: a tensor of shape (columns,) and any floating-point dtype, or None for zeros.
        eps: a number added to the variance.
        residual: a tensor of x's shape and dtype, or None.
        dropout: dropout of x before the addition, indexed by elements in contiguous order; or None. The mask
            has the same bits on the CPU (``torch.ops.gpipe_fast.keyed_bernoulli``) and on a GPU (kernel).

    Returns:
        The norm, in x's shape and dtype. With a residual also the sum, which is the next residual.

    Raises:
        ValueError: shapes or dtypes do not match, or the dropout arguments are invalid.
        RuntimeError: dropout runs on the CPU and gpipe_fast's extension is not loaded.
    """
    return _apply(x, weight, bias, eps, residual, dropout, "layer")


@overload
def rms_norm(x: Tensor, weight: Tensor | None = ..., eps: float = ..., residual: None = ...) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = ..., eps: float = ..., *, residual: Tensor, dropout: Draw | None = ...
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    dropout: Draw | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes RMSNorm over the last dimension of x or of ``residual + dropout(x)`` (arXiv 1910.07467).

    Saves x, or the sum if there is a residual. The backward recomputes the root mean square, and regenerates
    the mask.

    Args:
        x: a tensor of shape (..., columns); fp32, fp16 or bf16. Arithmetic is in fp32. PyTorch's operators
            compute fp64.
        weight: a tensor of shape (columns,) and any floating-point dtype, or None for ones.
        eps: a number added to the mean square.
        residual: a tensor of x's shape and dtype, or None.
        dropout: dropout of x before the addition, indexed by elements in contiguous order; or None. The mask
            has the same bits on the CPU (``torch.ops.gpipe_fast.keyed_bernoulli``) and on a GPU (kernel).

    Returns:
        The norm, in x's shape and dtype. With a residual also the sum, which is the next residual.

    Raises:
        ValueError: shapes or dtypes do not match, or the dropout arguments are invalid.
        RuntimeError: dropout runs on the CPU and gpipe_fast's extension is not loaded.
    """
    return _apply(x, weight, None, eps, residual, dropout, "rms")


def layer_norm_backward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    g: Tensor,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    g_sum: Tensor | None = None,
    dropout: Draw | None = None,
) -> Gradients:
    """Computes the output and the gradients of a recomputed `layer_norm` in one pass.

    Args:
        x: the first argument of `layer_norm`, of shape (..., columns).
        weight: a tensor of shape (columns,), or None.
        bias: a tensor of shape (columns,), or None.
        g: the gradient of the norm, in x's shape and dtype.
        eps: a number added to the variance.
        residual: a tensor of x's shape and dtype, or None if the norm was of x alone.
        g_sum: the gradient that the norm's input (x or the sum) receives from the residual stream, in x's
            shape and dtype; or None.
        dropout: the same as in the forward.

    Returns:
        The norm, and the gradients of x, residual, weight and bias (None for absent inputs). Without dropout
        the gradients of x and residual are the same tensor.

    Raises:
        ValueError: shapes or dtypes do not match, or the dropout arguments are invalid.
        RuntimeError: dropout runs on the CPU and gpipe_fast's extension is not loaded.
    """
    return _apply_backward(x, weight, bias, g, eps, residual, g_sum, dropout, "layer")


def rms_norm_backward(
    x: Tensor,
    weight: Tensor | None,
    g: Tensor,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    g_sum: Tensor | None = None,
    dropout: Draw | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Computes the output and the gradients of a recomputed `rms_norm` in one pass.

    Args:
        x: the first argument of `rms_norm`, of shape (..., columns).
        weight: a tensor of shape (columns,), or None.
        g: the gradient of the norm, in x's shape and dtype.
        eps: a number added to the mean square.
        residual: a tensor of x's shape and dtype, or None if the norm was of x alone.
        g_sum: the gradient that the norm's input (x or the sum) receives from the residual stream, in x's
            shape and dtype; or None.
        dropout: the same as in the forward.

    Returns:
        The norm, and the gradients of x, residual and weight (None for absent inputs). Without dropout the
        gradients of x and residual are the same tensor.

    Raises:
        ValueError: shapes or dtypes do not match, or the dropout arguments are invalid.
        RuntimeError: dropout runs on the CPU and gpipe_fast's extension is not loaded.
    """
    return _apply_backward(x, weight, None, g, eps, residual, g_sum, dropout, "rms")[:4]


def _apply(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    residual: Tensor | None, dropout: Draw | None, kind: str,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    _check(x, weight, bias, dropout, residual=residual)
    found: Tensor | tuple[Tensor, Tensor]
    if residual is None:
        found = _norm(x, weight, bias, eps, kind)
    else:
        found = _add_norm(x, residual, weight, bias, eps, kind, *(dropout or ()))
    return found


def _apply_backward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, g: Tensor,
    eps: float, residual: Tensor | None, g_sum: Tensor | None, dropout: Draw | None, kind: str,
) -> Gradients:  # fmt: skip
    _check(x, weight, bias, dropout, g=g, residual=residual, g_sum=g_sum)
    inputs = (x, residual, weight, bias, g, g_sum)
    y, dsum, dx, dweight, dbias = _norm_backward(*inputs, eps, kind, True, *(dropout or ()))
    return (
        y,
        dsum if dropout is None else dx,
        None if residual is None else dsum,
        None if weight is None else dweight,
        None if bias is None else dbias,
    )


def _check(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dropout: Draw | None, **like_x: Tensor | None
) -> None:
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"x must be a floating-point tensor of shape (..., columns), got {_describe(x)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and (parameter.shape != x.shape[-1:] or not parameter.is_floating_point()):
            raise ValueError(
                f"the {name} must match the columns of x, {_describe(x)}, got {_describe(parameter)}"
            )
    for name, other in like_x.items():
        if other is not None and (other.shape != x.shape or other.dtype != x.dtype):
            raise ValueError(f"{name} must have x's shape and dtype, {_describe(x)}, got {_describe(other)}")
    if dropout is not None:
        if like_x["residual"] is None:
            raise ValueError(
                "dropout applies to x before it is added to a residual, but residual is None; pass a "
                "residual, or dropout=None"
            )
        dropout.check(x)


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"


def _kernels_support(max_columns: int, x: Tensor, *others: Tensor | None) -> bool:
    return x.shape[-1] <= max_columns and uses_kernels(x, *others)


def _norm_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    if _kernels_support(norms.MAX_COLUMNS, x, weight, bias):
        return norms.launch_forward(x, None, weight, bias, eps, kind, None)[0]
    return reference.norm(x, weight, bias, eps, kind)


@torch.library.triton_op("gpipe_fast::norm", mutates_args={})
def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    return _norm_forward(x, weight, bias, eps, kind)


# Operator schemas have no `Draw` type: its fields are separate arguments, and key=None means no dropout.
@torch.library.triton_op("gpipe_fast::add_norm", mutates_args={})
def _add_norm(
    h: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str,
    p: float = 0.0, key: Tensor | None = None, layer: int = 0, ordinal: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    draw = None if key is None else Draw(p, key, layer, ordinal)
    if _kernels_support(norms.max_columns(draw), h, residual, weight, bias, key):
        y, x, _, _ = norms.launch_forward(h, residual, weight, bias, eps, kind, draw)
        assert x is not None, "the launcher returns the sum, because there is a residual"
    else:
        x = _residual_sum(h, residual, draw)
        y = _norm_forward(x, weight, bias, eps, kind)
    return y, x


@torch.library.triton_op("gpipe_fast::norm_backward", mutates_args={})
def _norm_backward(
    h: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    g: Tensor, g_sum: Tensor | None, eps: float, kind: str, with_y: bool,
    p: float = 0.0, key: Tensor | None = None, layer: int = 0, ordinal: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    draw = None if key is None else Draw(p, key, layer, ordinal)
    others = (weight, bias, g, g_sum)
    if _kernels_support(norms.max_columns(draw), h, residual, key, *others):
        found = norms.launch_backward(h, residual, *others, eps, kind, with_y, draw)[:5]
    else:
        x = h if residual is None else _residual_sum(h, residual, draw)
        if _kernels_support(norms.MAX_COLUMNS, x, *others):
            y, dsum, _, dweight, dbias, _ = norms.launch_backward(x, None, *others, eps, kind, with_y, None)
        else:
            y, dsum, dweight, dbias = reference.norm_backward(x, *others, eps, kind, with_y)
        found = y, dsum, None if draw is None else dropout_add_forward(dsum, None, draw), dweight, dbias
    y, dsum, dh, dweight, dbias = (h.new_empty(0) if t is None else t for t in found)
    return y, dsum, dh, dweight, dbias


def _residual_sum(h: Tensor, residual: Tensor, draw: Draw | None) -> Tensor:
    return residual + h if draw is None else dropout_add_forward(h, residual, draw)


def _setup(ctx, inputs, output):
    x, weight, bias, ctx.eps, ctx.kind = inputs
    ctx.save_for_backward(x, weight, bias)


def _differentiate(ctx, g):
    x, weight, bias = ctx.saved_tensors
    _, dx, _, dweight, dbias = _norm_backward(x, None, weight, bias, g, None, ctx.eps, ctx.kind, False)
    return dx, None if weight is None else dweight, None if bias is None else dbias, None, None


def _setup_add_norm(ctx, inputs, output):
    _, _, weight, bias, ctx.eps, ctx.kind, ctx.p, key, ctx.layer, ctx.ordinal = inputs
    ctx.save_for_backward(output[1], weight, bias, key)
    ctx.set_materialize_grads(False)


def _differentiate_add_norm(ctx, g, g_sum):
    x, weight, bias, key = ctx.saved_tensors
    draw = () if key is None else (ctx.p, key, ctx.layer, ctx.ordinal)
    if g is None:
        # The norm is unused, so only the gradient of the sum propagates.
        dsum, dweight, dbias = g_sum, None, None
        dh = dropout_add(g_sum, None, *draw) if draw else g_sum
    else:
        inputs = (x, None, weight, bias, g, g_sum)
        _, dsum, dh, dweight, dbias = _norm_backward(*inputs, ctx.eps, ctx.kind, False, *draw)
        dh = dh if draw else dsum
    dweight, dbias = None if weight is None else dweight, None if bias is None else dbias
    return dh, dsum, dweight, dbias, *[None] * 6


_norm.register_autograd(_differentiate, setup_context=_setup)
_add_norm.register_autograd(_differentiate_add_norm, setup_context=_setup_add_norm)
