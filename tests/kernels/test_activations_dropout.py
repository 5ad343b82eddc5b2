"""Dropout behind bias and activation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpipe_fast.kernels import Draw, bias_activation, bias_activation_backward, reference
from gpipe_fast.kernels.activations import ACTIVATIONS
from gpipe_fast.randomness.random import make_key
from tests.kernels.comparison import check, doubles, every_dtype, every_width, strided, with_gradients
from tests.kernels.test_activations import eager

PLACE = (5, 1)


def dropped(z: Tensor, bias: Tensor | None, activation: str, draw: Draw) -> Tensor:
    """PyTorch's own operators, with the mask of gpipe_fast's keyed op."""
    scale = 0.0 if draw.p == 1.0 else 1 / (1 - draw.p)
    return eager(z, bias, activation) * reference.keep(z.shape, *draw) * scale


def compare(z: Tensor, bias: Tensor | None, g: Tensor, activation: str, draw: Draw) -> None:
    inputs = [z] if bias is None else [z, bias]
    ours = bias_activation_backward(z, bias, g, activation, draw)
    if bias is None:
        assert ours[2] is None
    ours = ours[: 1 + len(inputs)]
    wide = doubles([*inputs, g])
    other = with_gradients(lambda z, b=None: dropped(z, b, activation, draw), inputs, [g])
    truth = with_gradients(lambda z, b=None: dropped(z, b, activation, draw), wide[:-1], [wide[-1]])
    check(ours, other, truth)
    again = with_gradients(lambda z, b=None: bias_activation(z, b, activation, draw), inputs, [g])
    assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=True))


@every_dtype
@every_width
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_sizes(activation: str, cols: int, dtype: torch.dtype) -> None:
    z, g = torch.randn(2, 2, 3, cols, dtype=dtype)
    compare(3 * z, torch.randn(cols, dtype=dtype), g, activation, Draw(0.3, make_key(7, 2, 1), *PLACE))


@every_width
def test_the_mask_is_that_of_the_keyed_op(cols: int) -> None:
    draw = Draw(1 / 3, make_key(-1, 2**32 - 1, 4), *PLACE)
    ones = torch.ones(5, cols)
    expected = reference.keep(ones.shape, *draw) / (1 - draw.p)
    a, dz, _ = bias_activation_backward(ones, None, ones, "relu", draw)
    assert all(torch.equal(found, expected) for found in (a, dz, bias_activation(ones, None, "relu", draw)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_many_rows_of_every_activation(activation: str) -> None:
    z, g = torch.randn(2, 40, 64)
    compare(z, None, g, activation, Draw(0.5, make_key(7, 2), *PLACE))


@every_dtype
def test_layouts(dtype: torch.dtype) -> None:
    z, g = torch.randn(2, 4, 5, 100, dtype=dtype)
    bias, draw = torch.randn(100, dtype=dtype), Draw(0.1, make_key(7, 2), *PLACE)
    compare(strided(z), strided(bias), strided(g), "gelu", draw)
    compare(z.transpose(0, 1), bias, g.transpose(0, 1), "gelu", draw)
    compare(z, bias, g[:1, :1, :1].expand(4, 5, 100), "gelu", draw)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0**-33])
def test_ends_of_the_probability(p: float) -> None:
    z, g = torch.randn(2, 4, 63)
    compare(z, torch.randn(63), g, "gelu_tanh", Draw(p, make_key(1, 1), *PLACE))


@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (0, 0), (3, 0, 5)])
def test_nothing(shape: tuple[int, ...]) -> None:
    z, draw = torch.randn(shape), Draw(0.5, make_key(1, 1), 0, 0)
    a, dz, dbias = bias_activation_backward(z, torch.randn(shape[-1]), z, "gelu", draw)
    assert a.shape == dz.shape == z.shape
    assert torch.equal(dbias, torch.zeros(shape[-1]))
