"""Benchmark cases and tunings of LayerNorm and RMSNorm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import liger
from bench.case import KernelCase, ShapeClass, Tuning
from bench.families import keyed
from gpipe_fast.kernels import layer_norm_backward, rms_norm_backward
from gpipe_fast.kernels.launch import Config
from gpipe_fast.kernels.norms import CONFIGS, launch_backward

COLS = 4096
LAYER_EPS, RMS_EPS = 1e-5, 1e-6
# Elements of a block per thread: minimum and maximum.
MIN_THREAD_ELEMENTS, MAX_THREAD_ELEMENTS = 8, 64


def layer_inputs(elements: int, dtype: torch.dtype, device: str, cols: int = COLS) -> list[Tensor]:
    """Returns the norm's input, weight and bias."""
    x = torch.randn(max(1, elements // cols), cols, dtype=dtype, device=device)
    return [x, *(torch.randn(cols, dtype=dtype, device=device) for _ in range(2))]


def rms_inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns the norm's input and weight."""
    return layer_inputs(elements, dtype, device)[:2]


def residual_inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns h, the residual, the weight, and the sum's gradient from the residual stream."""
    h, weight = rms_inputs(elements, dtype, device)
    return [h, torch.randn_like(h), weight, torch.randn_like(h)]


def keyed_inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns h (before dropout), residual, weight, bias, the residual stream's gradient, and the key."""
    h, weight, bias = layer_inputs(elements, dtype, device)
    return [h, torch.randn_like(h), weight, bias, torch.randn_like(h), keyed.make_key(device)]


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Computes PyTorch's RMSNorm; on meta tensors LayerNorm, which moves the same bytes.

    PyTorch has a fused RMSNorm only on a GPU.
    """
    if x.device.type == "meta":
        return F.layer_norm(x, x.shape[-1:], weight, None, RMS_EPS)
    return F.rms_norm(x, x.shape[-1:], weight, RMS_EPS)


class _NormWithResidualStream(torch.autograd.Function):
    """Identity on the norm y whose backward also passes g_sum to the sum x, without recomputing the sum."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, g_sum: Tensor) -> Tensor:
        ctx.save_for_backward(g_sum)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        return g, ctx.saved_tensors[0], None


def _plain_residual(h: Tensor, residual: Tensor, weight: Tensor, g_sum: Tensor) -> Tensor:
    x = residual + h
    y: Tensor = _NormWithResidualStream.apply(plain_rms_norm(x, weight), x, g_sum)
    return y


def _streamed_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, g_sum: Tensor) -> Tensor:
    y: Tensor = _NormWithResidualStream.apply(
        F.layer_norm(x, x.shape[-1:], weight, bias, LAYER_EPS), x, g_sum
    )
    return y


def _liger_residual(h: Tensor, residual: Tensor, weight: Tensor, g_sum: Tensor) -> Tensor:
    y: Tensor = _NormWithResidualStream.apply(*liger.residual_rms_norm(h, residual, weight, RMS_EPS), g_sum)
    return y


def _residual(
    h: Tensor, residual: Tensor, weight: Tensor, g_sum: Tensor, g: Tensor
) -> tuple[Tensor | None, ...]:
    return rms_norm_backward(h, weight, g, RMS_EPS, residual, g_sum)


def _without_residual(found: Sequence[Tensor | None]) -> list[Tensor | None]:
    y, dx, _, *parameters = found
    return [y, dx, *parameters]


LAYER = KernelCase(
    "layer_norm",
    layer_inputs,
    differentiated=(0, 1, 2),
    baseline=lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, LAYER_EPS),
    ours=lambda x, weight, bias, g: _without_residual(layer_norm_backward(x, weight, bias, g, eps=LAYER_EPS)),
    launched=lambda x, weight, bias, g: launch_backward(
        x, None, weight, bias, g, None, LAYER_EPS, "layer", True, None
    ),
    liger=partial(liger.layer_norm, eps=LAYER_EPS),
)
RMS = KernelCase(
    "rms_norm",
    rms_inputs,
    differentiated=(0, 1),
    baseline=plain_rms_norm,
    ours=lambda x, weight, g: _without_residual(rms_norm_backward(x, weight, g, eps=RMS_EPS)),
    launched=lambda x, weight, g: launch_backward(x, None, weight, None, g, None, RMS_EPS, "rms", True, None),
    liger=partial(liger.rms_norm, eps=RMS_EPS),
)
RESIDUAL = KernelCase(
    "rms_norm with residual",
    residual_inputs,
    differentiated=(0, 1, 2),
    baseline=_plain_residual,
    ours=_residual,
    launched=lambda h, residual, weight, g_sum, g: launch_backward(
        h, residual, weight, None, g, g_sum, RMS_EPS, "rms", True, None
    ),
    liger=_liger_residual,
)

DROPOUT = KernelCase(
    "layer_norm with residual and dropout",
    keyed_inputs,
    differentiated=(0, 1, 2, 3),
    baseline=lambda h, residual, weight, bias, g_sum, key: _streamed_layer_norm(
        residual + keyed.baseline(h), weight, bias, g_sum
    ),
    ours=lambda h, residual, weight, bias, g_sum, key, g: layer_norm_backward(
        h, weight, bias, g, LAYER_EPS, residual, g_sum, keyed.draw(key)
    ),
    launched=lambda h, residual, weight, bias, g_sum, key, g: launch_backward(
        h, residual, weight, bias, g, g_sum, LAYER_EPS, "layer", True, keyed.draw(key)
    ),
    exact=lambda h, residual, weight, bias, g_sum, key: _streamed_layer_norm(
        residual + keyed.exact(h, key), weight, bias, g_sum
    ),
)


def _shape(widest: int) -> ShapeClass:
    """Returns a shape class. A program holds whole rows."""
    blocks = [{"ROWS": rows, "COLS": widest} for rows in (1, 2, 4, 8, 16, 32)]
    return ShapeClass(
        partial(layer_inputs, 1 << 24, cols=widest),
        [
            Config(sizes, num_warps=warps)
            for sizes in blocks
            for warps in (2, 4, 8, 16, 32)
            if MIN_THREAD_ELEMENTS <= sizes["ROWS"] * widest / (32 * warps) <= MAX_THREAD_ELEMENTS
        ],
    )


CASES = [LAYER, RMS, RESIDUAL, DROPOUT]
TUNINGS = [Tuning("norm", LAYER, {f"cols<={widest}": _shape(widest) for widest in CONFIGS})]
