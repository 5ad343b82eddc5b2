"""LayerNorm and RMSNorm of ``residual + dropout(h)``, against PyTorch."""

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
    every_dtype,
    every_width,
    needs_kernels,
    noncontiguous,
    outputs_and_gradients,
    shape_beyond_one_block,
    to_float64,
)
from tests.kernels.numerics.test_norms import EPS, eager, every_norm

LAYER_AND_ORDINAL = (5, 1)


def eager_with_dropout(inputs: list[Tensor], kind: str, draw: Draw) -> tuple[Tensor, ...]:
    """Returns the results of PyTorch's operators, with the mask of gpipe_fast's keyed operator."""
    h, residual, weight, *bias = inputs
    scale = 0.0 if draw.p == 1.0 else 1 / (1 - draw.p)
    return eager(h * reference.keep(h.shape, *draw) * scale, residual, weight, *(bias or [None]), kind)


def ours(inputs: list[Tensor], kind: str, draw: Draw) -> tuple[Tensor, ...]:
    """Returns the same results from the kernels."""
    h, residual, *parameters = inputs
    norm = layer_norm if kind == "layer" else rms_norm
    return norm(h, *parameters, eps=EPS, residual=residual, dropout=draw)


def fused_backward(inputs: list[Tensor], gradients: list[Tensor], kind: str, draw: Draw) -> list[Tensor]:
    """Returns the norm and the gradients of all inputs, computed in one pass."""
    h, residual, *parameters = inputs
    backward = layer_norm_backward if kind == "layer" else rms_norm_backward
    return list(backward(h, *parameters, gradients[0], EPS, residual, gradients[1], draw))


def compare_with_pytorch(inputs: list[Tensor], gradients: list[Tensor], kind: str, draw: Draw) -> None:
    found = outputs_and_gradients(lambda *t: ours(list(t), kind, draw), inputs, gradients)
    other = outputs_and_gradients(lambda *t: eager_with_dropout(list(t), kind, draw), inputs, gradients)
    wide = to_float64(inputs), to_float64(gradients)
    check(found, other, outputs_and_gradients(lambda *t: eager_with_dropout(list(t), kind, draw), *wide))
    once = fused_backward(inputs, gradients, kind, draw)
    assert all(torch.equal(a, b) for a, b in zip([found[0], *found[2:]], once, strict=True))


def random_inputs(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> tuple[list[Tensor], list[Tensor]]:
    h, residual, *gradients = torch.randn(4, *shape, dtype=dtype)
    parameters = torch.randn(2 if kind == "layer" else 1, shape[-1], dtype=dtype)
    return [2 * h + 1, residual, *parameters], gradients


@every_dtype
@every_width
@every_norm
def test_norms_with_dropout_match_pytorch_for_every_width(kind: str, cols: int, dtype: torch.dtype) -> None:
    shape = shape_beyond_one_block(norms.choose(cols).blocks["ROWS"], cols)
    compare_with_pytorch(
        *random_inputs(shape, dtype, kind), kind, Draw(0.3, make_key(7, 2, 1), *LAYER_AND_ORDINAL)
    )


@every_dtype
@pytest.mark.parametrize("cols", [norms.MAX_COLUMNS_DROPOUT, norms.MAX_COLUMNS, norms.MAX_COLUMNS + 1])
def test_rms_norm_with_dropout_of_the_widest_rows_matches_pytorch(cols: int, dtype: torch.dtype) -> None:
    compare_with_pytorch(
        *random_inputs((3, cols), dtype, "rms"), "rms", Draw(0.1, make_key(7, 2, 1), *LAYER_AND_ORDINAL)
    )


@every_width
def test_rms_norm_drops_the_elements_that_the_keyed_operator_drops(cols: int) -> None:
    draw = Draw(0.5, make_key(-1, 2**32 - 1, 4), *LAYER_AND_ORDINAL)
    ones, g_sum = torch.ones(5, cols), torch.full((5, cols), 3.0)
    kept = 2.0 * reference.keep(ones.shape, *draw)
    _, total = rms_norm(ones, residual=ones, dropout=draw)
    assert torch.equal(total, ones + kept)
    _, dx, dresidual, _ = rms_norm_backward(ones, None, 0 * ones, EPS, ones, g_sum, draw)
    assert torch.equal(dresidual, g_sum)
    assert torch.equal(dx, g_sum * kept)


@every_dtype
def test_layer_norm_with_dropout_of_noncontiguous_tensors_matches_pytorch(dtype: torch.dtype) -> None:
    inputs, gradients = random_inputs((4, 5, 100), dtype, "layer")
    draw = Draw(0.1, make_key(7, 2), *LAYER_AND_ORDINAL)
    compare_with_pytorch(
        [noncontiguous(t) for t in inputs], [noncontiguous(g) for g in gradients], "layer", draw
    )
    h, residual, *parameters = inputs
    transposed = [h.transpose(0, 1), residual.transpose(0, 1), *parameters]
    compare_with_pytorch(transposed, [g.transpose(0, 1) for g in gradients], "layer", draw)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0**-33])
@every_norm
def test_norms_with_extreme_dropout_probabilities_match_pytorch(kind: str, p: float) -> None:
    compare_with_pytorch(
        *random_inputs((4, 63), torch.float32, kind), kind, Draw(p, make_key(1, 1), *LAYER_AND_ORDINAL)
    )


@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (0, 0), (3, 0, 5)])
@every_norm
def test_norms_with_dropout_of_empty_tensors_are_empty(kind: str, shape: tuple[int, ...]) -> None:
    inputs, gradients = random_inputs(shape, torch.float32, kind)
    y, dx, dresidual, dweight, *_ = fused_backward(inputs, gradients, kind, Draw(0.5, make_key(1, 1), 0, 0))
    assert y.shape == dx.shape == dresidual.shape == shape
    assert torch.equal(dweight, torch.zeros(shape[-1]))


@needs_kernels
def test_dropout_before_a_norm_of_wide_rows_is_drawn_by_the_dropout_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The keyed operator is never called; the reference norm is called only for rows too wide for kernels."""

    def fail(*_: object) -> None:
        raise AssertionError("the reference was called")

    monkeypatch.setattr(reference, "keep", fail)
    draw = Draw(0.5, make_key(1, 1), 0, 0)
    outputs_and_gradients(
        lambda *t: ours(list(t), "rms", draw),
        *random_inputs((2, norms.MAX_COLUMNS + 1), torch.float32, "rms"),
    )
    monkeypatch.setattr(reference, "norm", fail)
    monkeypatch.setattr(reference, "norm_backward", fail)
    inputs, gradients = random_inputs((2, norms.MAX_COLUMNS), torch.float32, "rms")
    outputs_and_gradients(lambda *t: ours(list(t), "rms", draw), inputs, gradients)
    fused_backward(inputs, gradients, "rms", draw)
