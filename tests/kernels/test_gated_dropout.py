"""Dropout behind gated pairs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpipe_fast.kernels import Draw, gated_activation, gated_activation_backward, reference
from gpipe_fast.kernels.activations import ACTIVATIONS
from gpipe_fast.randomness.random import make_key
from tests.kernels.comparison import check, doubles, every_dtype, every_width, strided, with_gradients
from tests.kernels.test_gated import eager

PLACE = (5, 1)


def dropped(z: Tensor, up: Tensor | None, activation: str, draw: Draw) -> Tensor:
    """PyTorch's own operators, with the mask of gpipe_fast's keyed op."""
    a = eager(z, up, activation)
    return a * reference.keep(a.shape, *draw) * (0.0 if draw.p == 1.0 else 1 / (1 - draw.p))


def compare(z: Tensor, up: Tensor | None, g: Tensor, activation: str, draw: Draw) -> None:
    inputs = [z] if up is None else [z, up]
    ours = gated_activation_backward(z, up, g, activation, draw)[: 1 + len(inputs)]
    wide = doubles([*inputs, g])
    other = with_gradients(lambda z, u=None: dropped(z, u, activation, draw), inputs, [g])
    truth = with_gradients(lambda z, u=None: dropped(z, u, activation, draw), wide[:-1], [wide[-1]])
    check(ours, other, truth)
    again = with_gradients(lambda z, u=None: gated_activation(z, u, activation, draw), inputs, [g])
    assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=True))


@every_dtype
@every_width
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_sizes(activation: str, cols: int, dtype: torch.dtype) -> None:
    z, g = 3 * torch.randn(2, 3, 2 * cols, dtype=dtype), torch.randn(2, 3, cols, dtype=dtype)
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


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_many_rows_of_every_activation(activation: str) -> None:
    compare(torch.randn(40, 128), None, torch.randn(40, 64), activation, Draw(0.5, make_key(7, 2), *PLACE))


@every_dtype
def test_layouts(dtype: torch.dtype) -> None:
    z, up, g = torch.randn(3, 4, 5, 100, dtype=dtype)
    draw = Draw(0.1, make_key(7, 2), *PLACE)
    compare(strided(z), strided(up), strided(g), "gelu", draw)
    compare(strided(z), None, strided(g)[..., :50], "gelu", draw)
    compare(z.transpose(0, 1), up.transpose(0, 1), g.transpose(0, 1), "gelu", draw)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0**-33])
def test_ends_of_the_probability(p: float) -> None:
    z, up, g = torch.randn(3, 4, 63)
    compare(z, up, g, "silu", Draw(p, make_key(1, 1), *PLACE))


@pytest.mark.parametrize("shape", [(0, 8), (7, 0), (0, 0), (3, 0, 6)])
def test_nothing(shape: tuple[int, ...]) -> None:
    z, draw = torch.randn(shape), Draw(0.5, make_key(1, 1), 0, 0)
    a, dz, dup = gated_activation_backward(z, z, z, "silu", draw)
    assert a.shape == dz.shape == dup.shape == z.shape
