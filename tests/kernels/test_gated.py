"""Gated pairs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.kernels import gated_activation, gated_activation_backward
from gpipe_fast.kernels.activations import ACTIVATIONS
from tests.kernels.comparison import check, doubles, every_dtype, every_width, strided, with_gradients

every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def eager(z: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """PyTorch's own operators."""
    gate, through = z.chunk(2, -1) if up is None else (z, up)
    if activation.startswith("gelu"):
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * through
    return (F.relu(gate) if activation == "relu" else F.silu(gate)) * through


def unfused(z: Tensor, up: Tensor | None, g: Tensor, activation: str) -> list[Tensor | None]:
    """What the fused backward returns, by autograd."""
    inputs = [z] if up is None else [z, up]
    found = with_gradients(lambda z, u=None: eager(z, u, activation), inputs, [g])
    return [*found, None] if up is None else found


def compare(z: Tensor, up: Tensor | None, g: Tensor, activation: str) -> None:
    ours = gated_activation_backward(z, up, g, activation)
    wide = doubles([z, up, g])
    check(ours, unfused(z, up, g, activation), unfused(*wide, activation))
    again = with_gradients(
        lambda z, u=None: gated_activation(z, u, activation), [z] if up is None else [z, up], [g]
    )
    assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=False) if b is not None)


@every_dtype
@every_width
@every_activation
def test_sizes(activation: str, cols: int, dtype: torch.dtype) -> None:
    z, g = 3 * torch.randn(3, 3, 2 * cols, dtype=dtype), torch.randn(3, 3, cols, dtype=dtype)
    compare(z, None, g, activation)
    compare(*(half.contiguous() for half in z.chunk(2, -1)), g, activation)


@every_dtype
def test_layouts(dtype: torch.dtype) -> None:
    z, up, g = torch.randn(3, 4, 5, 100, dtype=dtype)
    compare(strided(z), strided(up), strided(g), "silu")
    compare(strided(z), None, strided(g)[..., :50], "silu")
    compare(z.transpose(0, 1), up.transpose(0, 1), g.transpose(0, 1), "silu")
    compare(z, up, g[:1, :1, :1].expand(4, 5, 100), "gelu")
    # Halves of one tensor, as two.
    compare(*z.chunk(2, -1), g[..., 50:], "gelu")


def test_one_row_of_one_dimension() -> None:
    z, up, g = torch.randn(3, 100)
    compare(z, up, g, "silu")
    compare(z, None, g[:50], "silu")


@pytest.mark.parametrize("shape", [(0, 8), (7, 0), (0, 0), (3, 0, 6)])
def test_nothing(shape: tuple[int, ...]) -> None:
    z = torch.randn(shape)
    a, dz, dup = gated_activation_backward(z, z, z, "silu")
    assert a.shape == dz.shape == dup.shape == z.shape
    half = torch.randn(*shape[:-1], shape[-1] // 2)
    a, dz, dup = gated_activation_backward(z, None, half, "silu")
    assert (a.shape, dz.shape, dup) == (half.shape, z.shape, None)


def test_large_values_stay_finite() -> None:
    z = torch.tensor([[-1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4]])
    for activation in ACTIVATIONS:
        compare(z, z.flip(1), torch.ones_like(z), activation)
