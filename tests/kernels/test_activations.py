"""Bias and activation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.kernels import bias_activation, bias_activation_backward
from gpipe_fast.kernels.activations import ACTIVATIONS
from tests.kernels.comparison import check, doubles, every_dtype, every_width, strided, with_gradients

every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def eager(z: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """PyTorch's own operators."""
    x = z if bias is None else z + bias
    if activation.startswith("gelu"):
        return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    return F.relu(x) if activation == "relu" else F.silu(x)


def unfused(z: Tensor, bias: Tensor | None, g: Tensor, activation: str) -> list[Tensor | None]:
    """What the fused backward returns, by autograd."""
    inputs = [z] if bias is None else [z, bias]
    found = with_gradients(lambda z, b=None: eager(z, b, activation), inputs, [g])
    return [*found, None] if bias is None else found


def compare(z: Tensor, bias: Tensor | None, g: Tensor, activation: str) -> None:
    ours = bias_activation_backward(z, bias, g, activation)
    wide = doubles([z, bias, g])
    check(ours, unfused(z, bias, g, activation), unfused(*wide, activation))
    again = with_gradients(
        lambda z, b=None: bias_activation(z, b, activation), [z] if bias is None else [z, bias], [g]
    )
    assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=False) if b is not None)


@every_dtype
@every_width
@every_activation
def test_sizes(activation: str, cols: int, dtype: torch.dtype) -> None:
    z, g = torch.randn(2, 3, 19, cols, dtype=dtype)
    compare(3 * z, torch.randn(cols, dtype=dtype), g, activation)


@every_dtype
@every_activation
def test_without_a_bias(activation: str, dtype: torch.dtype) -> None:
    z, g = torch.randn(2, 5, 100, dtype=dtype)
    compare(z, None, g, activation)


@every_dtype
def test_layouts(dtype: torch.dtype) -> None:
    z, g, bias = (
        torch.randn(4, 5, 100, dtype=dtype),
        torch.randn(4, 5, 100, dtype=dtype),
        torch.randn(100, dtype=dtype),
    )
    compare(strided(z), strided(bias), strided(g), "gelu")
    compare(z.transpose(0, 1), bias, g.transpose(0, 1), "gelu")
    compare(z, bias, g[:1, :1, :1].expand(4, 5, 100), "gelu")


@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (0, 0), (3, 0, 5)])
def test_nothing(shape: tuple[int, ...]) -> None:
    z = torch.randn(shape)
    a, dz, dbias = bias_activation_backward(z, torch.randn(shape[-1]), z, "gelu")
    assert a.shape == dz.shape == z.shape
    assert torch.equal(dbias, torch.zeros(shape[-1]))


def test_large_values_stay_finite() -> None:
    z = torch.tensor([[-1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4]])
    for activation in ACTIVATIONS:
        compare(z, None, torch.ones_like(z), activation)
