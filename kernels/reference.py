"""Reference implementations of every kernel in plain PyTorch; they also compute on CPU tensors.

Like the kernels, they compute at least in fp32 and round the result to the dtype of the input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.kernels.philox import Draw


def to_fp32_or_wider(tensor: Tensor) -> Tensor:
    """Converts a tensor to fp32; leaves fp64 unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def activate(x: Tensor, activation: str) -> Tensor:
    """Computes act(x)."""
    if activation == "relu":
        return F.relu(x)
    if activation == "silu":
        return F.silu(x)
    if activation == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if activation in ("sigmoid", "tanh"):
        return torch.sigmoid(x) if activation == "sigmoid" else torch.tanh(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def activate_backward(g: Tensor, x: Tensor, activation: str) -> Tensor:
    """Computes ``g act'(x)``."""
    found: Tensor
    if activation == "relu":
        found = torch.ops.aten.threshold_backward(g, x, 0)
    elif activation == "silu":
        found = torch.ops.aten.silu_backward(g, x)
    elif activation == "quick_gelu":
        v = 1.702 * x
        found = g * (torch.sigmoid(v) * (1 + v * torch.sigmoid(-v)))
    elif activation == "sigmoid":
        found = torch.ops.aten.sigmoid_backward(g, torch.sigmoid(x))
    elif activation == "tanh":
        found = torch.ops.aten.tanh_backward(g, torch.tanh(x))
    else:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        found = torch.ops.aten.gelu_backward(g, x, approximate=approximate)
    return found


def bias_activation(z: Tensor, bias: Tensor | None, activation: str, draw: Draw | None = None) -> Tensor:
    """Computes ``dropout(act(z + bias))``."""
    x = to_fp32_or_wider(z) if bias is None else to_fp32_or_wider(z) + to_fp32_or_wider(bias)
    a = activate(x, activation)
    return (a if draw is None else apply_dropout(a, *draw)).to(z.dtype)


def bias_activation_backward(
    z: Tensor, bias: Tensor | None, g: Tensor, activation: str, with_a: bool, draw: Draw | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the output (empty unless ``with_a``), the gradient of z and the bias gradient (or None)."""
    x = to_fp32_or_wider(z) if bias is None else to_fp32_or_wider(z) + to_fp32_or_wider(bias)
    a, g = activate(x, activation), to_fp32_or_wider(g)
    if draw is not None:
        a, g = apply_dropout(a, *draw), apply_dropout(g, *draw)
    dz = activate_backward(g, x, activation)
    dbias = None if bias is None else _sum_rows(dz, bias)
    return a.to(z.dtype) if with_a else z.new_empty(0), dz.to(z.dtype), dbias


# Dropout: kernels/dropout.py, and dropout fused into other families.


def keep(size: Sequence[int], p: float, key: Tensor, layer: int, ordinal: int) -> Tensor:
    """Returns the mask of kept elements (bool), drawn by gpipe_fast's op.

    Raises:
        RuntimeError: gpipe_fast's extension is not loaded.
    """
    keyed = torch.ops.gpipe_fast
    if not hasattr(keyed, "keyed_bernoulli"):
        raise RuntimeError(
            "dropout on the CPU needs torch.ops.gpipe_fast.keyed_bernoulli of gpipe_fast's extension, "
            "which is not loaded: import gpipe_fast first"
        )
    kept: Tensor = keyed.keyed_bernoulli(
        key, layer, ordinal, size, 1.0 - p, dtype=torch.bool, device=key.device
    )
    return kept


def apply_dropout(x: Tensor, p: float, key: Tensor, layer: int, ordinal: int) -> Tensor:
    """Computes dropout(x). Applied to a gradient with the same key, it is also the backward."""
    return x * keep(x.shape, p, key, layer, ordinal) * (0.0 if p == 1.0 else 1.0 / (1.0 - p))


def dropout_add(
    h: Tensor, residual: Tensor | None, p: float, key: Tensor, layer: int, ordinal: int
) -> Tensor:
    """Computes ``residual + dropout(h)``."""
    y = apply_dropout(to_fp32_or_wider(h.contiguous()), p, key, layer, ordinal)
    return (y if residual is None else y + to_fp32_or_wider(residual)).to(h.dtype).contiguous()


# Gated pairs: kernels/gated.py.


def gated_activation(z: Tensor, up: Tensor | None, activation: str, draw: Draw | None = None) -> Tensor:
    """Computes ``dropout(act(gate) * up)``."""
    gate, up_values = (
        to_fp32_or_wider(z).chunk(2, -1) if up is None else (to_fp32_or_wider(z), to_fp32_or_wider(up))
    )
    a = activate(gate, activation) * up_values
    return (a if draw is None else apply_dropout(a, *draw)).to(z.dtype).contiguous()


def gated_activation_backward(
    z: Tensor, up: Tensor | None, g: Tensor, activation: str, with_a: bool, draw: Draw | None = None
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Returns the output (if ``with_a``) and the gradients of z and up (None if up is packed in z)."""
    gate, up_values = (
        to_fp32_or_wider(z).chunk(2, -1) if up is None else (to_fp32_or_wider(z), to_fp32_or_wider(up))
    )
    b_act, g = activate(gate, activation), to_fp32_or_wider(g)
    a = b_act * up_values
    if draw is not None:
        a, g = apply_dropout(a, *draw), apply_dropout(g, *draw)
    dgate, dup = activate_backward(g * up_values, gate, activation), g * b_act
    output = a.to(z.dtype).contiguous() if with_a else None
    if up is None:
        return output, torch.cat([dgate, dup], -1).to(z.dtype), None
    return output, dgate.to(z.dtype).contiguous(), dup.to(z.dtype).contiguous()


# LayerNorm and RMSNorm.


def _deviations(x: Tensor, eps: float, kind: str) -> tuple[Tensor, Tensor]:
    """Returns the deviations from the mean (or x for RMSNorm), and the mean of their squares plus eps.

    The mean is subtracted twice: the mean of the deviations is the rounding error of the first mean, which is
    large if x is far from zero.
    """
    for _ in range(2 if kind == "layer" else 0):
        x = x - x.mean(-1, keepdim=True)
    return x, x.square().mean(-1, keepdim=True) + eps


def _apply_weight_and_bias(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * to_fp32_or_wider(weight)
    return y if bias is None else y + to_fp32_or_wider(bias)


def _sum_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Sums over all dimensions but the last. The result never aliases ``rows``, not even for one row."""
    return rows[None].sum_to_size(like.shape).to(like.dtype)


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    """Computes norm(x), where x is the input or the sum."""
    d, variance = _deviations(to_fp32_or_wider(x), eps, kind)
    return _apply_weight_and_bias(d * variance.rsqrt(), weight, bias).to(x.dtype)


def norm_backward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, g: Tensor, g_sum: Tensor | None,
    eps: float, kind: str, with_y: bool,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Returns y (if ``with_y``) and the gradients of x, weight and bias; None for absent ones."""
    d, variance = _deviations(to_fp32_or_wider(x), eps, kind)
    r = variance.rsqrt()
    y = _apply_weight_and_bias(d * r, weight, bias).to(x.dtype) if with_y else None
    g = to_fp32_or_wider(g)
    dweight = None if weight is None else _sum_rows(g * (d * r), weight)
    dbias = None if bias is None else _sum_rows(g, bias)
    g = _apply_weight_and_bias(g, weight, None)
    dx = g - d * ((g * d).mean(-1, keepdim=True) / variance)
    if kind == "layer":
        dx = dx - g.mean(-1, keepdim=True)
    dx = dx * r if g_sum is None else dx * r + to_fp32_or_wider(g_sum)
    return y, dx.to(x.dtype), dweight, dbias


# Rotary position embedding.


def rotary_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool = False) -> None:
    """Rotates q and k, of shape (batch, length, heads, head_dim), in place."""
    for x in (q, k):
        half = cos.shape[-1]
        c, s = to_fp32_or_wider(cos).unsqueeze(-2), to_fp32_or_wider(-sin if inverse else sin).unsqueeze(-2)
        first, second = slice(0, half), slice(half, 2 * half)
        if interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        x1, x2 = to_fp32_or_wider(x[..., first]), to_fp32_or_wider(x[..., second])
        y1, y2 = x1 * c - x2 * s, x2 * c + x1 * s
        x[..., first] = y1
        x[..., second] = y2


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns q and k rotated by their positions' angles, or by the opposite angles."""
    rotated = torch.empty_like(q).copy_(q), torch.empty_like(k).copy_(k)
    rotary_(*rotated, cos, sin, interleaved, inverse)
    return rotated


# Gradients of many tensors.


def _record_non_finite(found_inf: Tensor, x: Tensor) -> None:
    found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(x)).any().to(found_inf.dtype)))


def accumulate_(accumulators: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Computes ``accumulators[i] += gradients[i]`` in the wider dtype."""
    for a, g in zip(accumulators, gradients, strict=True):
        a.add_(g)


def unscale_(gradients: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor) -> None:
    """Computes ``gradients[i] *= inverse_scale``; sets found_inf to 1 if an input is inf or NaN."""
    for g in gradients:
        _record_non_finite(found_inf, g)
        g.copy_(to_fp32_or_wider(g) * inverse_scale.reshape(()))


def accumulate_and_check_(
    accumulators: Sequence[Tensor], gradients: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor
) -> None:
    """Computes ``accumulators[i] += inverse_scale * gradients[i]``; sets found_inf to 1 for inf and NaN."""
    for a, g in zip(accumulators, gradients, strict=True):
        a.copy_(to_fp32_or_wider(a) + to_fp32_or_wider(g) * inverse_scale.reshape(()))
        _record_non_finite(found_inf, a)


# Cross-entropy.


def cross_entropy(
    logits: Tensor, target: Tensor, scale: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Returns the loss of each row and its scaled gradient, for two-dimensional logits."""
    x = to_fp32_or_wider(logits)
    losses = F.cross_entropy(
        x, target, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    ignored = (target == ignore_index).unsqueeze(-1)
    gradient = x.softmax(-1) - label_smoothing / max(1, x.shape[-1])
    classes = target.unsqueeze(-1).masked_fill(ignored, 0)
    gradient = gradient.scatter_add(
        -1, classes, gradient.new_full((1, 1), label_smoothing - 1).expand_as(classes)
    )
    return losses, (gradient * scale).masked_fill(ignored, 0).to(logits.dtype)


def scale_(gradient: Tensor, g: Tensor) -> None:
    """Computes ``gradient *= g``, where g has one element, or one per row."""
    gradient.copy_(to_fp32_or_wider(gradient) * (g if g.dim() == 0 else g.unsqueeze(-1)))
