"""Dropout and residual addition, against PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.kernels import dropout_add, reference
from gpipe_fast.randomness.random import KeyedRandomMode, make_key
from tests.kernels.numerics.comparison import (
    check,
    every_dtype,
    every_width,
    noncontiguous,
    outputs_and_gradients,
    to_float64,
)

LAYER, ORDINAL = 5, 1


def eager(h: Tensor, residual: Tensor | None, p: float, key: Tensor) -> Tensor:
    """Returns PyTorch's dropout with gpipe_fast's keyed draws, as the second random operator of the layer."""
    mode = KeyedRandomMode(key)
    mode.enter_layer(LAYER)
    with mode:
        torch.rand(1)
        # The draw uses h's dtype; a float64 draw has the same bits.
        y = F.dropout(h, p)
    return y if residual is None else residual + y


def compare_with_pytorch(h: Tensor, residual: Tensor | None, g: Tensor, p: float, key: Tensor) -> None:
    inputs = [h] if residual is None else [h, residual]
    ours = outputs_and_gradients(lambda h, r=None: dropout_add(h, r, p, key, LAYER, ORDINAL), inputs, [g])
    other = outputs_and_gradients(lambda h, r=None: eager(h, r, p, key), inputs, [g])
    wide = to_float64([*inputs, g])
    truth = outputs_and_gradients(lambda h, r=None: eager(h, r, p, key), wide[:-1], [wide[-1]])
    check(ours, other, truth)
    if h.dtype == torch.float32:
        # Both round each product and sum once.
        assert all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))


@every_dtype
@every_width
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_add_matches_pytorch_for_every_width(p: float, cols: int, dtype: torch.dtype) -> None:
    h, residual, g = torch.randn(3, 7, cols, dtype=dtype)
    compare_with_pytorch(h, residual, g, p, make_key(11, 3, 2))
    compare_with_pytorch(h, None, g, p, make_key(11, 3, 2))


@every_width
def test_dropout_add_drops_the_elements_that_the_keyed_operator_drops(cols: int) -> None:
    for key in (make_key(0, 0), make_key(-5, 2**32 - 1, 9)):
        ones, p = torch.ones(5, cols), 1 / 3
        kept = reference.keep((5, cols), p, key, LAYER, ORDINAL)
        assert torch.equal(dropout_add(ones, None, p, key, LAYER, ORDINAL), kept / (1 - p))


@every_dtype
def test_dropout_add_of_noncontiguous_tensors_matches_pytorch(dtype: torch.dtype) -> None:
    h, residual, g = torch.randn(3, 4, 5, 100, dtype=dtype)
    key = make_key(1, 1)
    compare_with_pytorch(noncontiguous(h), noncontiguous(residual), noncontiguous(g), 0.3, key)
    compare_with_pytorch(h.transpose(0, 1), residual.transpose(0, 1), g.transpose(0, 1), 0.3, key)
    compare_with_pytorch(h, residual[:1, :1].expand_as(h), g[:1, :1, :1].expand_as(h), 0.3, key)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0**-33, 1 - 2.0**-40])
def test_dropout_add_with_extreme_probabilities_matches_pytorch(p: float) -> None:
    h, residual, g = torch.randn(3, 4, 63)
    compare_with_pytorch(h, residual, g, p, make_key(1, 1))


def test_dropout_add_treats_infinity_and_nan_like_pytorch() -> None:
    h, key = torch.tensor([float("inf"), float("nan"), -1.0]).repeat(40), make_key(1, 1)
    ours, other = dropout_add(h, None, 0.5, key, LAYER, ORDINAL), eager(h, None, 0.5, key)
    torch.testing.assert_close(ours, other, rtol=0, atol=0, equal_nan=True)
    assert ours.isnan().sum() > 40


@pytest.mark.parametrize("shape", [(0,), (0, 7), (7, 0), (3, 0, 5)])
def test_dropout_add_of_empty_tensors_is_empty(shape: tuple[int, ...]) -> None:
    h = torch.randn(shape)
    assert dropout_add(h, h, 0.5, make_key(1, 1), 0, 0).shape == h.shape


def test_dropout_add_of_scalars_matches_pytorch() -> None:
    compare_with_pytorch(torch.tensor(2.0), torch.tensor(3.0), torch.tensor(1.0), 0.5, make_key(1, 1))


def test_dropout_add_reads_its_key_when_the_kernel_runs() -> None:
    h, key = torch.ones(1000), make_key(1, 1)
    first = dropout_add(h, None, 0.5, key, 0, 0)
    key.copy_(make_key(2, 1))
    assert not torch.equal(first, dropout_add(h, None, 0.5, key, 0, 0))
