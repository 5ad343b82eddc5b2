"""The norms' launchers with a dtype for each tensor, and with optional results, against PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.kernels import norms
from gpipe_fast.kernels.philox import Draw
from gpipe_fast.randomness.random import make_key
from tests.kernels.numerics.comparison import check, needs_kernels, to_float64
from tests.kernels.numerics.test_norms import every_norm

pytestmark = needs_kernels

EPS = 1e-5
FP16, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Dtypes:
    """The dtype of each tensor; parameters and dx have the dtype of the stream unless named."""

    h: torch.dtype
    stream: torch.dtype
    y: torch.dtype
    g: torch.dtype
    parameters: torch.dtype
    dh: torch.dtype


MIXES = {
    "autocast": Dtypes(h=FP16, stream=FP32, y=FP16, g=FP16, parameters=FP32, dh=FP16),
    "half stream, fp32 parameters": Dtypes(h=FP16, stream=FP16, y=FP32, g=FP32, parameters=FP32, dh=FP16),
    # The interpreter stores bf16 incorrectly, so all outputs are fp32.
    "bf16 inputs": Dtypes(h=BF16, stream=FP32, y=FP32, g=BF16, parameters=BF16, dh=FP32),
}
every_mix = pytest.mark.parametrize("dtypes", MIXES.values(), ids=MIXES)


def random_inputs(shape: tuple[int, ...], dtypes: Dtypes, kind: str) -> list[Tensor | None]:
    """Returns h, residual, weight, bias, g and g_sum."""
    h, residual, g, g_sum = torch.randn(4, *shape)
    weight, bias = torch.randn(2, shape[-1]).to(dtypes.parameters)
    return [
        (2 * h + 1).to(dtypes.h),
        residual.to(dtypes.stream),
        weight,
        bias if kind == "layer" else None,
        g.to(dtypes.g),
        g_sum.to(dtypes.stream),
    ]


def mask_of(shape: tuple[int, ...], draw: Draw | None) -> Tensor:
    """Returns dropout's factor of each element, drawn by gpipe_fast's operator."""
    if draw is None:
        return torch.ones(shape)
    kept = torch.ops.gpipe_fast.keyed_bernoulli(
        draw.key.cpu(), draw.layer, draw.ordinal, shape, 1 - draw.p, dtype=torch.bool, device="cpu"
    )
    return kept.to(draw.key.device) / (1 - draw.p)


def eager(inputs: list[Tensor | None], dtypes: Dtypes | None, kind: str, factor: Tensor) -> list[Tensor]:
    """Returns all results of PyTorch's operators: in these dtypes, or without ``dtypes`` in float64."""
    h, residual, *parameters, g, g_sum = inputs
    assert h is not None
    assert residual is not None
    leaves = [None if t is None else t.detach().requires_grad_() for t in (h, residual, *parameters)]
    total = leaves[1] + (leaves[0] * factor.to(h.dtype))
    wide = total if dtypes is None else total.float()
    weight, bias = (None if t is None or dtypes is None else t.float() for t in leaves[2:])
    if dtypes is None:
        _, _, weight, bias = leaves
    if kind == "layer":
        y = F.layer_norm(wide, wide.shape[-1:], weight, bias, EPS)
    else:
        y = F.rms_norm(wide, wide.shape[-1:], weight, EPS)
    y = y if dtypes is None else y.to(dtypes.y)
    present = [t for t in (total, *leaves) if t is not None]
    dx, dh, _, *dparameters = torch.autograd.grad([y, total], present, [g.to(y.dtype), g_sum])
    sums = (dh if dtypes is None else dh.float()).flatten(0, -2).sum(0)
    dh = dh if dtypes is None else dh.to(dtypes.dh)
    mean = wide.mean(-1)
    centered = wide - mean[..., None] if kind == "layer" else wide
    r = (centered.square().mean(-1) + EPS).rsqrt()
    statistics = [t.detach().flatten() for t in ([mean, r] if kind == "layer" else [r])]
    return [y.detach(), total.detach(), *statistics, dx, dh, *dparameters, sums]


def ours(inputs: list[Tensor | None], dtypes: Dtypes, kind: str, draw: Draw | None) -> list[Tensor | None]:
    forward = norms.launch_forward(*inputs[:4], EPS, kind, draw, y_dtype=dtypes.y, with_statistics=True)
    backward = norms.launch_backward(
        *inputs, EPS, kind, True, draw, y_dtype=dtypes.y, dh_dtype=dtypes.dh, with_sums=True
    )
    assert torch.equal(backward.y, forward.y)
    return [t for t in (*forward, *backward[1:]) if t is not None]


def compare_with_pytorch(shape: tuple[int, ...], dtypes: Dtypes, kind: str, draw: Draw | None = None) -> None:
    inputs, factor = random_inputs(shape, dtypes, kind), mask_of(shape, draw)
    other, truth = eager(inputs, dtypes, kind, factor), eager(to_float64(inputs), None, kind, factor.double())
    check(ours(inputs, dtypes, kind, draw), other, truth)


@every_mix
@every_norm
@pytest.mark.parametrize("cols", [100, 1500])
def test_norms_of_mixed_dtypes_match_pytorch(kind: str, dtypes: Dtypes, cols: int) -> None:
    compare_with_pytorch((3, 5, cols), dtypes, kind)


@every_mix
@every_norm
@pytest.mark.parametrize("cols", [99, 100])
def test_norms_of_mixed_dtypes_with_dropout_match_pytorch(kind: str, dtypes: Dtypes, cols: int) -> None:
    draw = Draw(0.25, make_key(7, 2, 1), 5, 1)
    compare_with_pytorch((3, 5, cols), dtypes, kind, draw)


@every_norm
def test_norms_of_mixed_dtypes_of_the_widest_rows_match_pytorch(kind: str) -> None:
    compare_with_pytorch((1, 3, norms.MAX_COLUMNS_SUMS), MIXES["autocast"], kind)
    compare_with_pytorch((1, 3, norms.MAX_COLUMNS_SUMS + 1), MIXES["autocast"], kind)


def test_a_norm_rounds_the_sum_to_its_own_dtype() -> None:
    h, residual = torch.randn(5, 100).half(), torch.randn(5, 100)
    launched = norms.launch_forward(h, residual, None, None, EPS, "rms", None, y_dtype=FP32)
    assert torch.equal(launched.total, residual + h)
    rounded = norms.launch_forward(h, residual, None, None, EPS, "rms", None, sum_dtype=FP16, y_dtype=FP32)
    assert torch.equal(rounded.total, (residual + h).half())
    alone = norms.launch_forward(rounded.total, None, None, None, EPS, "rms", None, y_dtype=FP32)
    assert torch.equal(rounded.y, alone.y)
    assert not torch.equal(rounded.y, launched.y)
    g = torch.randn(5, 100)
    again, once = (
        norms.launch_backward(*x, None, None, g, None, EPS, "rms", True, None, y_dtype=FP32, dx_dtype=FP32)
        for x in ((h, residual), (rounded.total, None))
    )
    assert not torch.equal(again.dx, once.dx)
    again = norms.launch_backward(
        h, residual, None, None, g, None, EPS, "rms", True, None, y_dtype=FP32, dx_dtype=FP32, sum_dtype=FP16
    )
    assert torch.equal(again.dx, once.dx)
    assert torch.equal(again.y, once.y)


@every_norm
def test_norm_results_that_are_not_requested_are_none(kind: str) -> None:
    inputs = random_inputs((5, 100), MIXES["autocast"], "layer")
    forward = norms.launch_forward(*inputs[:4], EPS, kind, None, with_sum=False)
    assert forward[1:] == (None, None, None)
    full = norms.launch_backward(*inputs, EPS, kind, False, None)
    assert (full.y, full.dh, full.sums) == (None, None, None)
    frozen = norms.launch_backward(*inputs, EPS, kind, False, None, with_dweight=False, with_dbias=False)
    assert (frozen.dweight, frozen.dbias) == (None, None)
    assert torch.equal(frozen.dx, full.dx)
    statistics = norms.launch_forward(*inputs[:4], EPS, kind, None, with_statistics=True)
    assert (statistics.mean is None) == (kind == "rms")
    assert statistics.r.shape == (5,)
