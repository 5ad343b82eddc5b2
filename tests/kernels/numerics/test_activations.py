"""Bias and activation, with and without dropout after them, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpipe_fast.kernels import Draw, bias_activation, bias_activation_backward, reference
from gpipe_fast.kernels.activations import ACTIVATIONS, choose
from gpipe_fast.randomness.random import make_key
from tests.kernels.numerics.comparison import (
    DEVICE,
    activated,
    check,
    every_dtype,
    every_width,
    keyed_dropout,
    noncontiguous,
    outputs_and_gradients,
    shape_beyond_one_block,
    to_float64,
)

LAYER_AND_ORDINAL = (5, 1)

every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def eager(z: Tensor, bias: Tensor | None, activation: str, draw: Draw | None) -> Tensor:
    """Returns the result of PyTorch's operators."""
    x = z if bias is None else z + bias
    return keyed_dropout(activated(x, activation), draw)


def compare_with_pytorch(
    z: Tensor, bias: Tensor | None, g: Tensor, activation: str, draw: Draw | None = None
) -> None:
    inputs = [z] if bias is None else [z, bias]
    *ours, dbias = bias_activation_backward(z, bias, g, activation, draw)
    assert (dbias is None) == (bias is None)
    if bias is not None:
        ours.append(dbias)
    *wide, wide_g = to_float64([*inputs, g])
    other = outputs_and_gradients(lambda z, b=None: eager(z, b, activation, draw), inputs, [g])
    truth = outputs_and_gradients(lambda z, b=None: eager(z, b, activation, draw), wide, [wide_g])
    check(ours, other, truth)
    again = outputs_and_gradients(lambda z, b=None: bias_activation(z, b, activation, draw), inputs, [g])
    assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=True))


@every_dtype
@every_width
@every_activation
def test_bias_activations_match_pytorch_for_every_width(
    activation: str, cols: int, dtype: torch.dtype
) -> None:
    z, g = torch.randn(2, *shape_beyond_one_block(choose(cols).blocks["ROWS"], cols), dtype=dtype)
    compare_with_pytorch(3 * z, torch.randn(cols, dtype=dtype), g, activation)


@every_dtype
@every_width
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_bias_activations_with_dropout_match_pytorch_for_every_width(
    activation: str, cols: int, dtype: torch.dtype
) -> None:
    z, g = torch.randn(2, 3, cols, dtype=dtype)
    compare_with_pytorch(
        3 * z, torch.randn(cols, dtype=dtype), g, activation, Draw(0.3, make_key(7, 2, 1), *LAYER_AND_ORDINAL)
    )


@every_width
def test_bias_activation_drops_the_elements_that_the_keyed_operator_drops(cols: int) -> None:
    draw = Draw(1 / 3, make_key(-1, 2**32 - 1, 4), *LAYER_AND_ORDINAL)
    ones = torch.ones(5, cols)
    expected = reference.keep(ones.shape, *draw) / (1 - draw.p)
    a, dz, _ = bias_activation_backward(ones, None, ones, "relu", draw)
    assert all(torch.equal(found, expected) for found in (a, dz, bias_activation(ones, None, "relu", draw)))


@every_dtype
@every_activation
def test_activations_without_a_bias_match_pytorch(activation: str, dtype: torch.dtype) -> None:
    z, g = torch.randn(2, 5, 100, dtype=dtype)
    compare_with_pytorch(z, None, g, activation)


@every_activation
def test_activations_of_many_rows_with_dropout_match_pytorch(activation: str) -> None:
    z, g = torch.randn(2, 40, 64)
    compare_with_pytorch(z, None, g, activation, Draw(0.5, make_key(7, 2), *LAYER_AND_ORDINAL))


def test_relu_keeps_nan_and_passes_its_gradient() -> None:
    z, g = torch.tensor([[float("nan"), 1.0, 0.0, -1.0]]).to(DEVICE), torch.full((1, 4), 2.0).to(DEVICE)
    a, dz, _ = bias_activation_backward(z, None, g, "relu")
    torch.testing.assert_close(a, z.relu(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(dz, torch.ops.aten.threshold_backward(g, z, 0))
    torch.testing.assert_close(bias_activation(z, None, "relu"), a, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("p", [None, 0.1])
@every_dtype
def test_bias_activations_of_noncontiguous_tensors_match_pytorch(dtype: torch.dtype, p: float | None) -> None:
    z, g = torch.randn(2, 2, 3, 100, dtype=dtype)
    bias = torch.randn(100, dtype=dtype)
    draw = None if p is None else Draw(p, make_key(7, 2), *LAYER_AND_ORDINAL)
    compare_with_pytorch(noncontiguous(z), noncontiguous(bias), noncontiguous(g), "gelu", draw)
    compare_with_pytorch(z.transpose(0, 1), bias, g.transpose(0, 1), "gelu", draw)
    compare_with_pytorch(z, bias, g[:1, :1, :1].expand(2, 3, 100), "gelu", draw)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0**-33])
def test_bias_activations_with_extreme_dropout_probabilities_match_pytorch(p: float) -> None:
    z, g = torch.randn(2, 4, 63)
    compare_with_pytorch(z, torch.randn(63), g, "gelu_tanh", Draw(p, make_key(1, 1), *LAYER_AND_ORDINAL))


@pytest.mark.parametrize("p", [None, 0.5])
@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (0, 0), (3, 0, 5)])
def test_bias_activations_of_empty_tensors_are_empty(shape: tuple[int, ...], p: float | None) -> None:
    z, draw = torch.randn(shape), None if p is None else Draw(p, make_key(1, 1), 0, 0)
    a, dz, dbias = bias_activation_backward(z, torch.randn(shape[-1]), z, "gelu", draw)
    assert a.shape == dz.shape == z.shape
    assert torch.equal(dbias, torch.zeros(shape[-1]))


def test_activations_of_large_values_stay_finite() -> None:
    z = torch.tensor([[-1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4]])
    for activation in ACTIVATIONS:
        compare_with_pytorch(z, None, torch.ones_like(z), activation)
