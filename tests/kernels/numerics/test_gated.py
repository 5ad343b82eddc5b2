"""Gated activations, with and without dropout after them, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpipe_fast.kernels import Draw, gated_activation, gated_activation_backward, reference
from gpipe_fast.kernels.activations import ACTIVATIONS
from gpipe_fast.randomness.random import make_key
from tests.kernels.numerics.comparison import (
    activated,
    check,
    every_dtype,
    every_width,
    keyed_dropout,
    noncontiguous,
    outputs_and_gradients,
    to_float64,
)

LAYER_AND_ORDINAL = (5, 1)

every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def eager(z: Tensor, up: Tensor | None, activation: str, draw: Draw | None) -> Tensor:
    """Returns the result of PyTorch's operators."""
    gate, up_values = z.chunk(2, -1) if up is None else (z, up)
    return keyed_dropout(activated(gate, activation) * up_values, draw)


def compare_with_pytorch(
    z: Tensor, up: Tensor | None, g: Tensor, activation: str, draw: Draw | None = None
) -> None:
    inputs = [z] if up is None else [z, up]
    *ours, dup = gated_activation_backward(z, up, g, activation, draw)
    assert (dup is None) == (up is None)
    if up is not None:
        ours.append(dup)
    *wide, wide_g = to_float64([*inputs, g])
    other = outputs_and_gradients(lambda z, u=None: eager(z, u, activation, draw), inputs, [g])
    truth = outputs_and_gradients(lambda z, u=None: eager(z, u, activation, draw), wide, [wide_g])
    check(ours, other, truth)
    again = outputs_and_gradients(lambda z, u=None: gated_activation(z, u, activation, draw), inputs, [g])
    assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=True))


@every_dtype
@every_width
@every_activation
def test_gated_activations_match_pytorch_for_every_width(
    activation: str, cols: int, dtype: torch.dtype
) -> None:
    z, g = 3 * torch.randn(3, 2 * cols, dtype=dtype), torch.randn(3, cols, dtype=dtype)
    compare_with_pytorch(z, None, g, activation)
    compare_with_pytorch(*(half.contiguous() for half in z.chunk(2, -1)), g, activation)


@every_dtype
@every_width
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activations_with_dropout_match_pytorch_for_every_width(
    activation: str, cols: int, dtype: torch.dtype
) -> None:
    z, g = 3 * torch.randn(3, 2 * cols, dtype=dtype), torch.randn(3, cols, dtype=dtype)
    draw = Draw(0.3, make_key(7, 2, 1), *LAYER_AND_ORDINAL)
    compare_with_pytorch(z, None, g, activation, draw)
    compare_with_pytorch(*(half.contiguous() for half in z.chunk(2, -1)), g, activation, draw)


@every_width
def test_gated_activation_drops_the_elements_that_the_keyed_operator_drops(cols: int) -> None:
    draw = Draw(0.25, make_key(-1, 2**32 - 1, 4), *LAYER_AND_ORDINAL)
    ones = torch.ones(5, cols)
    expected = reference.keep(ones.shape, *draw) / (1 - draw.p)
    found = gated_activation_backward(ones, ones, ones, "relu", draw)
    assert all(torch.equal(t, expected) for t in (*found, gated_activation(ones, ones, "relu", draw)))


@every_activation
def test_gated_activations_of_many_rows_with_dropout_match_pytorch(activation: str) -> None:
    compare_with_pytorch(
        torch.randn(40, 128),
        None,
        torch.randn(40, 64),
        activation,
        Draw(0.5, make_key(7, 2), *LAYER_AND_ORDINAL),
    )


@every_dtype
def test_gated_activations_of_noncontiguous_tensors_match_pytorch(dtype: torch.dtype) -> None:
    z, up, g = torch.randn(3, 2, 3, 100, dtype=dtype)
    compare_with_pytorch(noncontiguous(z), noncontiguous(up), noncontiguous(g), "silu")
    compare_with_pytorch(noncontiguous(z), None, noncontiguous(g)[..., :50], "silu")
    compare_with_pytorch(z.transpose(0, 1), up.transpose(0, 1), g.transpose(0, 1), "silu")
    compare_with_pytorch(z, up, g[:1, :1, :1].expand(2, 3, 100), "gelu")
    # Two views that are the halves of one tensor.
    compare_with_pytorch(*z.chunk(2, -1), g[..., 50:], "gelu")


@every_dtype
def test_gated_activations_with_dropout_of_noncontiguous_tensors_match_pytorch(dtype: torch.dtype) -> None:
    z, up, g = torch.randn(3, 2, 3, 100, dtype=dtype)
    draw = Draw(0.1, make_key(7, 2), *LAYER_AND_ORDINAL)
    compare_with_pytorch(noncontiguous(z), noncontiguous(up), noncontiguous(g), "gelu", draw)
    compare_with_pytorch(noncontiguous(z), None, noncontiguous(g)[..., :50], "gelu", draw)
    compare_with_pytorch(z.transpose(0, 1), up.transpose(0, 1), g.transpose(0, 1), "gelu", draw)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0**-33])
def test_gated_activations_with_extreme_dropout_probabilities_match_pytorch(p: float) -> None:
    z, up, g = torch.randn(3, 4, 63)
    compare_with_pytorch(z, up, g, "silu", Draw(p, make_key(1, 1), *LAYER_AND_ORDINAL))


def test_gated_activations_of_one_dimensional_tensors_match_pytorch() -> None:
    z, up, g = torch.randn(3, 100)
    compare_with_pytorch(z, up, g, "silu")
    compare_with_pytorch(z, None, g[:50], "silu")


@pytest.mark.parametrize("p", [None, 0.5])
@pytest.mark.parametrize("shape", [(0, 8), (7, 0), (0, 0), (3, 0, 6)])
def test_gated_activations_of_empty_tensors_are_empty(shape: tuple[int, ...], p: float | None) -> None:
    z, draw = torch.randn(shape), None if p is None else Draw(p, make_key(1, 1), 0, 0)
    a, dz, dup = gated_activation_backward(z, z, z, "silu", draw)
    assert a.shape == dz.shape == dup.shape == z.shape
    half = torch.randn(*shape[:-1], shape[-1] // 2)
    a, dz, dup = gated_activation_backward(z, None, half, "silu", draw)
    assert (a.shape, dz.shape, dup) == (half.shape, z.shape, None)


def test_gated_activations_of_large_values_stay_finite() -> None:
    z = torch.tensor([[-1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4]])
    # The derivative of tanh(20) in float64 is 0, because it is computed as 1 - tanh(20)^2.
    for activation in (name for name in ACTIVATIONS if name != "tanh"):
        compare_with_pytorch(z, z.flip(1), torch.ones_like(z), activation)
