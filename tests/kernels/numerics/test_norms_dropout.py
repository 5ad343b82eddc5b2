"""LayerNorm and RMSNorm of a residual and what is added to it after dropout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpipe_fast.kernels import (
    Draw,
    layer_norm,
    layer_norm_backward,
    norms,
    reference,
    rms_norm,
    rms_norm_backward,
)
from gpipe_fast.randomness.random import make_key
from tests.kernels.numerics.comparison import (
    check,
    doubles,
    every_dtype,
    every_width,
    needs_kernels,
    rows_beyond,
    strided,
    with_gradients,
)
from tests.kernels.numerics.test_norms import EPS, eager, every_kind

PLACE = (5, 1)


def dropped(inputs: list[Tensor], kind: str, draw: Draw) -> tuple[Tensor, ...]:
    """PyTorch's own operators, with the mask of gpipe_fast's keyed op."""
    h, residual, weight, *bias = inputs
    scale = 0.0 if draw.p == 1.0 else 1 / (1 - draw.p)
    return eager(h * reference.keep(h.shape, *draw) * scale, residual, weight, *(bias or [None]), kind)


def ours(inputs: list[Tensor], kind: str, draw: Draw) -> tuple[Tensor, ...]:
    """The kernels."""
    h, residual, *parameters = inputs
    norm = layer_norm if kind == "layer" else rms_norm
    return norm(h, *parameters, eps=EPS, residual=residual, dropout=draw)


def fused(inputs: list[Tensor], gradients: list[Tensor], kind: str, draw: Draw) -> list[Tensor]:
    """Y, and the gradients of all inputs, in one pass."""
    h, residual, *parameters = inputs
    backward = layer_norm_backward if kind == "layer" else rms_norm_backward
    return list(backward(h, *parameters, gradients[0], EPS, residual, gradients[1], draw))


def compare(inputs: list[Tensor], gradients: list[Tensor], kind: str, draw: Draw) -> None:
    found = with_gradients(lambda *t: ours(list(t), kind, draw), inputs, gradients)
    other = with_gradients(lambda *t: dropped(list(t), kind, draw), inputs, gradients)
    wide = doubles(inputs), doubles(gradients)
    check(found, other, with_gradients(lambda *t: dropped(list(t), kind, draw), *wide))
    once = fused(inputs, gradients, kind, draw)
    assert all(torch.equal(a, b) for a, b in zip([found[0], *found[2:]], once, strict=True))


def problem(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> tuple[list[Tensor], list[Tensor]]:
    h, residual, *gradients = torch.randn(4, *shape, dtype=dtype)
    parameters = torch.randn(2 if kind == "layer" else 1, shape[-1], dtype=dtype)
    return [2 * h + 1, residual, *parameters], gradients


@every_dtype
@every_width
@every_kind
def test_sizes(kind: str, cols: int, dtype: torch.dtype) -> None:
    shape = rows_beyond(norms.choose(cols).blocks["ROWS"], cols)
    compare(*problem(shape, dtype, kind), kind, Draw(0.3, make_key(7, 2, 1), *PLACE))


@every_dtype
@pytest.mark.parametrize("cols", [norms.WIDEST_DRAWN, norms.WIDEST, norms.WIDEST + 1])
def test_widest_rows(cols: int, dtype: torch.dtype) -> None:
    compare(*problem((3, cols), dtype, "rms"), "rms", Draw(0.1, make_key(7, 2, 1), *PLACE))


@every_width
def test_the_mask_is_that_of_the_keyed_op(cols: int) -> None:
    draw = Draw(0.5, make_key(-1, 2**32 - 1, 4), *PLACE)
    ones, g_sum = torch.ones(5, cols), torch.full((5, cols), 3.0)
    kept = 2.0 * reference.keep(ones.shape, *draw)
    _, total = rms_norm(ones, residual=ones, dropout=draw)
    assert torch.equal(total, ones + kept)
    _, dx, dresidual, _ = rms_norm_backward(ones, None, 0 * ones, EPS, ones, g_sum, draw)
    assert torch.equal(dresidual, g_sum)
    assert torch.equal(dx, g_sum * kept)


@every_dtype
def test_layouts(dtype: torch.dtype) -> None:
    inputs, gradients = problem((4, 5, 100), dtype, "layer")
    draw = Draw(0.1, make_key(7, 2), *PLACE)
    compare([strided(t) for t in inputs], [strided(g) for g in gradients], "layer", draw)
    h, residual, *parameters = inputs
    turned = [h.transpose(0, 1), residual.transpose(0, 1), *parameters]
    compare(turned, [g.transpose(0, 1) for g in gradients], "layer", draw)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0**-33])
@every_kind
def test_ends_of_the_probability(kind: str, p: float) -> None:
    compare(*problem((4, 63), torch.float32, kind), kind, Draw(p, make_key(1, 1), *PLACE))


@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (0, 0), (3, 0, 5)])
@every_kind
def test_nothing(kind: str, shape: tuple[int, ...]) -> None:
    inputs, gradients = problem(shape, torch.float32, kind)
    y, dx, dresidual, dweight, *_ = fused(inputs, gradients, kind, Draw(0.5, make_key(1, 1), 0, 0))
    assert y.shape == dx.shape == dresidual.shape == shape
    assert torch.equal(dweight, torch.zeros(shape[-1]))


@needs_kernels
def test_wider_rows_are_drawn_by_the_kernel_for_dropout_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the keyed op nor, as long as kernels hold a row, the norm of the reference is asked."""

    def refuse(*_: object) -> None:
        raise AssertionError("the reference was asked")

    monkeypatch.setattr(reference, "keep", refuse)
    draw = Draw(0.5, make_key(1, 1), 0, 0)
    with_gradients(
        lambda *t: ours(list(t), "rms", draw), *problem((2, norms.WIDEST + 1), torch.float32, "rms")
    )
    monkeypatch.setattr(reference, "norm", refuse)
    monkeypatch.setattr(reference, "norm_backward", refuse)
    inputs, gradients = problem((2, norms.WIDEST), torch.float32, "rms")
    with_gradients(lambda *t: ours(list(t), "rms", draw), inputs, gradients)
    fused(inputs, gradients, "rms", draw)
