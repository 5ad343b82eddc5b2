"""Gated pairs, with and without dropout behind them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.kernels import Draw, gated_activation, gated_activation_backward, reference
from gpipe_fast.kernels.activations import ACTIVATIONS
from gpipe_fast.randomness.random import make_key
from tests.kernels.numerics.comparison import (
    check,
    doubles,
    dropped,
    every_dtype,
    every_width,
    strided,
    with_gradients,
)

PLACE = (5, 1)

every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def eager(z: Tensor, up: Tensor | None, activation: str, draw: Draw | None) -> Tensor:
    """PyTorch's own operators."""
    gate, through = z.chunk(2, -1) if up is None else (z, up)
    if activation.startswith("gelu"):
        a = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * through
    else:
        a = (F.relu(gate) if activation == "relu" else F.silu(gate)) * through
    return dropped(a, draw)


def compare(z: Tensor, up: Tensor | None, g: Tensor, activation: str, draw: Draw | None = None) -> None:
    inputs = [z] if up is None else [z, up]
    *ours, dup = gated_activation_backward(z, up, g, activation, draw)
    assert (dup is None) == (up is None)
    if up is not None:
        ours.append(dup)
    *wide, wide_g = doubles([*inputs, g])
    other = with_gradients(lambda z, u=None: eager(z, u, activation, draw), inputs, [g])
    truth = with_gradients(lambda z, u=None: eager(z, u, activation, draw), wide, [wide_g])
    check(ours, other, truth)
    again = with_gradients(lambda z, u=None: gated_activation(z, u, activation, draw), inputs, [g])
    assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=True))


@every_dtype
@every_width
@every_activation
def test_sizes(activation: str, cols: int, dtype: torch.dtype) -> None:
    z, g = 3 * torch.randn(3, 2 * cols, dtype=dtype), torch.randn(3, cols, dtype=dtype)
    compare(z, None, g, activation)
    compare(*(half.contiguous() for half in z.chunk(2, -1)), g, activation)


@every_dtype
@every_width
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_sizes_with_dropout(activation: str, cols: int, dtype: torch.dtype) -> None:
    z, g = 3 * torch.randn(3, 2 * cols, dtype=dtype), torch.randn(3, cols, dtype=dtype)
    draw = Draw(0.3, make_key(7, 2, 1), *PLACE)
    compare(z, None, g, activation, draw)
    compare(*(half.contiguous() for half in z.chunk(2, -1)), g, activation, draw)


@every_width
def test_the_mask_is_that_of_the_keyed_op(cols: int) -> None:
    draw = Draw(0.25, make_key(-1, 2**32 - 1, 4), *PLACE)
    ones = torch.ones(5, cols)
    expected = reference.keep(ones.shape, *draw) / (1 - draw.p)
    found = gated_activation_backward(ones, ones, ones, "relu", draw)
    assert all(torch.equal(t, expected) for t in (*found, gated_activation(ones, ones, "relu", draw)))


@every_activation
def test_many_rows_with_dropout(activation: str) -> None:
    compare(torch.randn(40, 128), None, torch.randn(40, 64), activation, Draw(0.5, make_key(7, 2), *PLACE))


@every_dtype
def test_layouts(dtype: torch.dtype) -> None:
    z, up, g = torch.randn(3, 2, 3, 100, dtype=dtype)
    compare(strided(z), strided(up), strided(g), "silu")
    compare(strided(z), None, strided(g)[..., :50], "silu")
    compare(z.transpose(0, 1), up.transpose(0, 1), g.transpose(0, 1), "silu")
    compare(z, up, g[:1, :1, :1].expand(2, 3, 100), "gelu")
    # Halves of one tensor, as two.
    compare(*z.chunk(2, -1), g[..., 50:], "gelu")


@every_dtype
def test_layouts_with_dropout(dtype: torch.dtype) -> None:
    z, up, g = torch.randn(3, 2, 3, 100, dtype=dtype)
    draw = Draw(0.1, make_key(7, 2), *PLACE)
    compare(strided(z), strided(up), strided(g), "gelu", draw)
    compare(strided(z), None, strided(g)[..., :50], "gelu", draw)
    compare(z.transpose(0, 1), up.transpose(0, 1), g.transpose(0, 1), "gelu", draw)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0**-33])
def test_ends_of_the_probability(p: float) -> None:
    z, up, g = torch.randn(3, 4, 63)
    compare(z, up, g, "silu", Draw(p, make_key(1, 1), *PLACE))


def test_one_row_of_one_dimension() -> None:
    z, up, g = torch.randn(3, 100)
    compare(z, up, g, "silu")
    compare(z, None, g[:50], "silu")


@pytest.mark.parametrize("p", [None, 0.5])
@pytest.mark.parametrize("shape", [(0, 8), (7, 0), (0, 0), (3, 0, 6)])
def test_nothing(shape: tuple[int, ...], p: float | None) -> None:
    z, draw = torch.randn(shape), None if p is None else Draw(p, make_key(1, 1), 0, 0)
    a, dz, dup = gated_activation_backward(z, z, z, "silu", draw)
    assert a.shape == dz.shape == dup.shape == z.shape
    half = torch.randn(*shape[:-1], shape[-1] // 2)
    a, dz, dup = gated_activation_backward(z, None, half, "silu", draw)
    assert (a.shape, dz.shape, dup) == (half.shape, z.shape, None)


def test_large_values_stay_finite() -> None:
    z = torch.tensor([[-1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4]])
    for activation in ACTIVATIONS:
        compare(z, z.flip(1), torch.ones_like(z), activation)
