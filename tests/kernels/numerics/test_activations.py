"""Bias and activation, with and without dropout behind them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.kernels import Draw, bias_activation, bias_activation_backward, reference
from gpipe_fast.kernels.activations import ACTIVATIONS, choose
from gpipe_fast.randomness.random import make_key
from tests.kernels.numerics.comparison import (
    check,
    doubles,
    dropped,
    every_dtype,
    every_width,
    rows_beyond,
    strided,
    with_gradients,
)

PLACE = (5, 1)

every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def eager(z: Tensor, bias: Tensor | None, activation: str, draw: Draw | None) -> Tensor:
    """PyTorch's own operators."""
    x = z if bias is None else z + bias
    if activation.startswith("gelu"):
        return dropped(F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none"), draw)
    return dropped(F.relu(x) if activation == "relu" else F.silu(x), draw)


def compare(z: Tensor, bias: Tensor | None, g: Tensor, activation: str, draw: Draw | None = None) -> None:
    inputs = [z] if bias is None else [z, bias]
    *ours, dbias = bias_activation_backward(z, bias, g, activation, draw)
    assert (dbias is None) == (bias is None)
    if bias is not None:
        ours.append(dbias)
    *wide, wide_g = doubles([*inputs, g])
    other = with_gradients(lambda z, b=None: eager(z, b, activation, draw), inputs, [g])
    truth = with_gradients(lambda z, b=None: eager(z, b, activation, draw), wide, [wide_g])
    check(ours, other, truth)
    again = with_gradients(lambda z, b=None: bias_activation(z, b, activation, draw), inputs, [g])
    assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=True))


@every_dtype
@every_width
@every_activation
def test_sizes(activation: str, cols: int, dtype: torch.dtype) -> None:
    z, g = torch.randn(2, *rows_beyond(choose(cols).blocks["ROWS"], cols), dtype=dtype)
    compare(3 * z, torch.randn(cols, dtype=dtype), g, activation)


@every_dtype
@every_width
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_sizes_with_dropout(activation: str, cols: int, dtype: torch.dtype) -> None:
    z, g = torch.randn(2, 3, cols, dtype=dtype)
    compare(3 * z, torch.randn(cols, dtype=dtype), g, activation, Draw(0.3, make_key(7, 2, 1), *PLACE))


@every_width
def test_the_mask_is_that_of_the_keyed_op(cols: int) -> None:
    draw = Draw(1 / 3, make_key(-1, 2**32 - 1, 4), *PLACE)
    ones = torch.ones(5, cols)
    expected = reference.keep(ones.shape, *draw) / (1 - draw.p)
    a, dz, _ = bias_activation_backward(ones, None, ones, "relu", draw)
    assert all(torch.equal(found, expected) for found in (a, dz, bias_activation(ones, None, "relu", draw)))


@every_dtype
@every_activation
def test_without_a_bias(activation: str, dtype: torch.dtype) -> None:
    z, g = torch.randn(2, 5, 100, dtype=dtype)
    compare(z, None, g, activation)


@every_activation
def test_many_rows_with_dropout(activation: str) -> None:
    z, g = torch.randn(2, 40, 64)
    compare(z, None, g, activation, Draw(0.5, make_key(7, 2), *PLACE))


@pytest.mark.parametrize("p", [None, 0.1])
@every_dtype
def test_layouts(dtype: torch.dtype, p: float | None) -> None:
    z, g = torch.randn(2, 2, 3, 100, dtype=dtype)
    bias, draw = torch.randn(100, dtype=dtype), None if p is None else Draw(p, make_key(7, 2), *PLACE)
    compare(strided(z), strided(bias), strided(g), "gelu", draw)
    compare(z.transpose(0, 1), bias, g.transpose(0, 1), "gelu", draw)
    compare(z, bias, g[:1, :1, :1].expand(2, 3, 100), "gelu", draw)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0**-33])
def test_ends_of_the_probability(p: float) -> None:
    z, g = torch.randn(2, 4, 63)
    compare(z, torch.randn(63), g, "gelu_tanh", Draw(p, make_key(1, 1), *PLACE))


@pytest.mark.parametrize("p", [None, 0.5])
@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (0, 0), (3, 0, 5)])
def test_nothing(shape: tuple[int, ...], p: float | None) -> None:
    z, draw = torch.randn(shape), None if p is None else Draw(p, make_key(1, 1), 0, 0)
    a, dz, dbias = bias_activation_backward(z, torch.randn(shape[-1]), z, "gelu", draw)
    assert a.shape == dz.shape == z.shape
    assert torch.equal(dbias, torch.zeros(shape[-1]))


def test_large_values_stay_finite() -> None:
    z = torch.tensor([[-1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4]])
    for activation in ACTIVATIONS:
        compare(z, None, torch.ones_like(z), activation)
