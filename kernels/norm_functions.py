"""LayerNorm and RMSNorm as functions and operators: what is checked, where it runs, how it is differentiated.

The formulas and kernels are in kernels/norms.py.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from gpipe_fast.kernels import norms, reference
from gpipe_fast.kernels.launch import runs_kernels

Gradients = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = ..., bias: Tensor | None = ..., eps: float = ..., residual: None = ...
) -> Tensor: ...


@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = ..., bias: Tensor | None = ..., eps: float = ..., *, residual: Tensor
) -> tuple[Tensor, Tensor]: ...


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm over the last dimension, of x or of ``residual + x`` (arXiv 1607.06450).

    Its backward computes mean and deviation again: what is kept is x, or the sum.

    Args:
        x: of shape (..., columns); fp32, fp16 or bf16. Computed in fp32; in fp64 by PyTorch's operators.
        weight: of shape (columns,), of any floating-point dtype, or None for ones.
        bias: of shape (columns,), of any floating-point dtype, or None for zeros.
        eps: added to the variance.
        residual: of x's shape and dtype, or None.

    Returns:
        The norm, of x's shape and dtype; with a residual also the sum, which is the next residual.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    return _apply(x, weight, bias, eps, residual, "layer")


@overload
def rms_norm(x: Tensor, weight: Tensor | None = ..., eps: float = ..., residual: None = ...) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = ..., eps: float = ..., *, residual: Tensor
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension, of x or of ``residual + x`` (arXiv 1910.07467).

    Its backward computes the root mean square again: what is kept is x, or the sum.

    Args:
        x: of shape (..., columns); fp32, fp16 or bf16. Computed in fp32; in fp64 by PyTorch's operators.
        weight: of shape (columns,), of any floating-point dtype, or None for ones.
        eps: added to the mean square.
        residual: of x's shape and dtype, or None.

    Returns:
        The norm, of x's shape and dtype; with a residual also the sum, which is the next residual.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    return _apply(x, weight, None, eps, residual, "rms")


def layer_norm_backward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    g: Tensor,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    g_sum: Tensor | None = None,
) -> Gradients:
    """What the backward of a recomputed `layer_norm` needs, in one pass.

    Args:
        x: what was normalised, or what was added to the residual; of shape (..., columns).
        weight: of shape (columns,), or None.
        bias: of shape (columns,), or None.
        g: the gradient of the norm, of x's shape and dtype.
        eps: added to the variance.
        residual: of x's shape and dtype, or None if x is what was normalised.
        g_sum: the gradient of what was normalised from elsewhere, which is the residual stream's; of x's
            shape and dtype, or None.

    Returns:
        The norm, the gradient of x and of the residual, which are the same, that of the weight, or None, and
        that of the bias, or None.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    return _apply_backward(x, weight, bias, g, eps, residual, g_sum, "layer")


def rms_norm_backward(
    x: Tensor,
    weight: Tensor | None,
    g: Tensor,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    g_sum: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the backward of a recomputed `rms_norm` needs, in one pass.

    Args:
        x: what was normalised, or what was added to the residual; of shape (..., columns).
        weight: of shape (columns,), or None.
        g: the gradient of the norm, of x's shape and dtype.
        eps: added to the mean square.
        residual: of x's shape and dtype, or None if x is what was normalised.
        g_sum: the gradient of what was normalised from elsewhere, which is the residual stream's; of x's
            shape and dtype, or None.

    Returns:
        The norm, the gradient of x and of the residual, which are the same, and that of the weight, or None.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    y, dx, dweight, _ = _apply_backward(x, weight, None, g, eps, residual, g_sum, "rms")
    return y, dx, dweight


def _apply(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None, kind: str
) -> Tensor | tuple[Tensor, Tensor]:
    _check(x, weight, bias, residual=residual)
    found: Tensor | tuple[Tensor, Tensor]
    if residual is None:
        found = _norm(x, weight, bias, eps, kind)
    else:
        found = _add_norm(x, residual, weight, bias, eps, kind)
    return found


def _apply_backward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, g: Tensor,
    eps: float, residual: Tensor | None, g_sum: Tensor | None, kind: str,
) -> Gradients:  # fmt: skip
    _check(x, weight, bias, g=g, residual=residual, g_sum=g_sum)
    y, dx, dweight, dbias = _norm_backward(x, residual, weight, bias, g, g_sum, eps, kind, True)
    return y, dx, None if weight is None else dweight, None if bias is None else dbias


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None, **like_x: Tensor | None) -> None:
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"x must have columns of floating-point numbers, got {_of(x)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and (parameter.shape != x.shape[-1:] or not parameter.is_floating_point()):
            raise ValueError(f"the {name} must have the last dimension of {_of(x)}, got {_of(parameter)}")
    for name, other in like_x.items():
        if other is not None and (other.shape != x.shape or other.dtype != x.dtype):
            raise ValueError(f"{name} must be as x is, {_of(x)}, got {_of(other)}")


def _of(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"


def _kernels_fit(x: Tensor, *others: Tensor | None) -> bool:
    return x.shape[-1] <= norms.WIDEST and x.dtype != torch.float64 and runs_kernels(x, *others)


@torch.library.triton_op("gpipe_fast::norm", mutates_args={})
def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    forward = norms.launch_forward if _kernels_fit(x, weight, bias) else reference.norm
    return forward(x, None, weight, bias, eps, kind)[0]


@torch.library.triton_op("gpipe_fast::add_norm", mutates_args={})
def _add_norm(
    h: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor]:
    forward = norms.launch_forward if _kernels_fit(h, residual, weight, bias) else reference.norm
    y, x = forward(h, residual, weight, bias, eps, kind)
    assert x is not None, "there is a residual"
    return y, x


@torch.library.triton_op("gpipe_fast::norm_backward", mutates_args={})
def _norm_backward(
    h: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    g: Tensor, g_sum: Tensor | None, eps: float, kind: str, with_y: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    fit = _kernels_fit(h, residual, weight, bias, g, g_sum)
    backward = norms.launch_backward if fit else reference.norm_backward
    y, dx, dweight, dbias = backward(h, residual, weight, bias, g, g_sum, eps, kind, with_y)
    y, dweight, dbias = (h.new_empty(0) if t is None else t for t in (y, dweight, dbias))
    return y, dx, dweight, dbias


def _setup(ctx, inputs, output):
    x, weight, bias, ctx.eps, ctx.kind = inputs
    ctx.save_for_backward(x, weight, bias)


def _setup_sum(ctx, inputs, output):
    _, _, weight, bias, ctx.eps, ctx.kind = inputs
    ctx.save_for_backward(output[1], weight, bias)
    ctx.set_materialize_grads(False)


def _gradients(ctx, g, g_sum):
    x, weight, bias = ctx.saved_tensors
    _, dx, dweight, dbias = _norm_backward(x, None, weight, bias, g, g_sum, ctx.eps, ctx.kind, False)
    return dx, None if weight is None else dweight, None if bias is None else dbias


def _differentiate(ctx, g):
    return *_gradients(ctx, g, None), None, None


def _differentiate_sum(ctx, g, g_sum):
    # Without a gradient of y, that of the sum passes as it is.
    dx, dweight, dbias = (g_sum, None, None) if g is None else _gradients(ctx, g, g_sum)
    return dx, dx, dweight, dbias, None, None


_norm.register_autograd(_differentiate, setup_context=_setup)
_add_norm.register_autograd(_differentiate_sum, setup_context=_setup_sum)
