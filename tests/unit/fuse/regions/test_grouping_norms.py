"""Norms that one kernel computes: over one or several dimensions, and over rows that fit in a program."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.fuse.regions.loops import MAX_ROW, Region
from tests.unit.fuse.graphs import regions_in


def layer_norm(x: Tensor, h: Tensor, shape: tuple[int, ...]) -> Tensor:
    return F.layer_norm(x + h, shape)


def rms_norm(x: Tensor, h: Tensor, shape: tuple[int, ...]) -> Tensor:
    return F.rms_norm(x + h, shape)


def softmax(x: Tensor, h: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.softmax((x + h).flatten(-len(shape)), -1)


def with_dropout(x: Tensor, h: Tensor, shape: tuple[int, ...]) -> Tensor:
    return F.layer_norm(x + torch.ops.aten.native_dropout_backward(h, h > 0, 2.0), shape)


NORMS = [layer_norm, rms_norm, softmax, with_dropout]


def regions_of_norm(
    function: Callable[..., Tensor], shape: tuple[int, ...], normalized: tuple[int, ...]
) -> list[Region]:
    return regions_in(lambda x, h: function(x, h, normalized), shape, shape)


@pytest.mark.parametrize("normalized", [(32,), (16, 32), (4, 16, 32)])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_over_the_last_dimensions_are_one_region(norm: Any, normalized: tuple[int, ...]) -> None:
    (region,) = regions_of_norm(norm, (4, 16, 32), normalized)
    assert region.loops.num_cols == math.prod(normalized)
    assert region.loops.num_rows == 4 * 16 * 32 // math.prod(normalized)
    assert region.loops.whole_rows
    assert (len(region.inputs), len(region.outputs)) == (2, 1)


@pytest.mark.parametrize(("dims", "fits"), [((2,), True), ((0, 2), True), ((0,), False), ((0, 1), False)])
def test_norms_over_outer_dimensions_alone_are_left(dims: tuple[int, ...], fits: bool) -> None:
    """A sum over rows of memory is complete after the last row, when the first one is needed again."""

    def norm(x: Tensor, h: Tensor) -> Tensor:
        x = x + h
        return x * torch.rsqrt((x * x).mean(dims, keepdim=True) + 1e-6)

    found = regions_in(norm, (4, 16, 32), (4, 16, 32))
    whole = ["add", "mul", "mean", "add", "rsqrt", "mul"]
    assert [whole == region.operators for region in found].count(True) == fits


@pytest.mark.parametrize("columns", [MAX_ROW, MAX_ROW + 1])
@pytest.mark.parametrize("norm", NORMS)
def test_rows_that_are_too_long_are_left(norm: Any, columns: int) -> None:
    found = regions_of_norm(norm, (3, columns), (columns,))
    fits = columns == MAX_ROW
    reducing = [r for r in found if any("norm" in o or "softmax" in o or o == "mean" for o in r.operators)]
    assert len(reducing) == fits
