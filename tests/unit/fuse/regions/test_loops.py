"""Which axes of a region are rows and columns, and what no loops compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.fuse.regions.axes import Conflict
from gpipe_fast.fuse.regions.loops import MAX_ROW, operator_name
from gpipe_fast.fuse.regions.values import root_of
from tests.unit.fuse.regions.made import region_of, sizes

aten = torch.ops.aten


def _norm_backward(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return aten.native_layer_norm_backward(g, x, [x.shape[-1]], mean, rstd, weight, bias, [True, True, True])


def test_a_norm_has_whole_rows_of_its_last_dimension() -> None:
    loops = region_of(lambda x, w: F.rms_norm(torch.tanh(x), (64,), w), (4, 8, 64), (64,)).loops
    assert sizes(loops) == ([4, 8], [64])
    assert (loops.num_rows, loops.num_cols) == (32, 64)
    assert loops.whole_rows
    assert not loops.column_sums


def test_gradients_of_a_norm_end_with_sums_over_rows() -> None:
    x, statistics = (4, 8, 64), (4, 8, 1)
    region = region_of(_norm_backward, x, x, statistics, statistics, (64,), (64,))
    loops = region.loops
    assert sizes(loops) == ([4, 8], [64])
    assert loops.whole_rows
    assert {*loops.column_sums} == {root_of(access.value) for access in region.outputs[1:]}
    by_shape = {access.tensor.shape: loops.varies[access.value] for access in region.inputs}
    assert by_shape[torch.Size(x)] == {*loops.rows, *loops.cols}
    assert by_shape[torch.Size(statistics)] == {*loops.rows}
    assert by_shape[torch.Size((64,))] == {*loops.cols}


def test_a_softmax_has_whole_rows_over_its_dimension() -> None:
    loops = region_of(lambda x: torch.softmax(x * 0.5, -1), (4, 8, 64)).loops
    assert sizes(loops) == ([4, 8], [64])
    assert loops.whole_rows


def test_element_wise_operators_have_columns_over_which_the_same_tensors_vary() -> None:
    loops = region_of(lambda x, y: torch.tanh(x) * y, (4, 8, 64), (4, 8, 64)).loops
    assert sizes(loops) == ([], [4, 8, 64])
    loops = region_of(lambda x, y: torch.tanh(x) * y, (4, 8, 64), (64,)).loops
    assert sizes(loops) == ([4, 8], [64])
    loops = region_of(lambda x, y: torch.tanh(x) * y, (4, 8, 64), (4, 1, 1)).loops
    assert sizes(loops) == ([4], [8, 64])
    assert not loops.whole_rows


def test_views_divide_rows_and_columns() -> None:
    def heads(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x).view(4, 8, 2, 32) * y

    loops = region_of(heads, (32, 64), (4, 8, 2, 32)).loops
    assert sizes(loops) == ([], [4, 8, 2, 32])
    loops = region_of(lambda x, y: torch.softmax(heads(x, y), -1), (32, 64), (4, 8, 2, 32)).loops
    assert sizes(loops) == ([4, 8, 2], [32])


def test_sums_over_rows_do_not_need_whole_rows() -> None:
    region = region_of(lambda x, y: (torch.tanh(x) * y).sum((0, 1)), (4, 8, 64), (4, 8, 64))
    assert sizes(region.loops) == ([4, 8], [64])
    assert not region.loops.whole_rows
    assert len(region.loops.column_sums) == 1


def test_a_cast_of_a_sum_over_rows_is_stored_in_its_place() -> None:
    region = region_of(lambda x: torch.tanh(x).sum(0).to(torch.bfloat16), (8, 64))
    (access,) = region.outputs
    total = region.loops.column_sums[access.value]
    assert operator_name(region.units[1]) == "sum"
    assert total in region.units[1].values


def test_expanded_tensors_do_not_vary_over_the_new_axis() -> None:
    region = region_of(lambda x, y: torch.tanh(x.expand(8, 64)) * y, (1, 64), (8, 64))
    assert sizes(region.loops) == ([8], [64])
    assert region.loops.varies[region.inputs[0].value] == {*region.loops.cols}


CONFLICTS: dict[str, tuple[Callable[..., Any], Sequence[Sequence[int]], str]] = {
    "a long row": (
        lambda x: torch.softmax(x, -1) * 2.0,
        [(2, MAX_ROW + 1)],
        "rows have 8193 columns, such a kernel holds 8192",
    ),
    "a transpose": (lambda x: torch.tanh(x) + torch.tanh(x).t(), [(8, 8)], "its own transpose"),
    "two dimensions": (
        lambda x: torch.softmax(torch.softmax(x, -1), 0),
        [(8, 64)],
        "reduced over different dimensions",
    ),
    "a sum used again": (
        lambda x: torch.softmax(x, -1) - torch.tanh(x).sum(0),
        [(8, 64)],
        "a sum over rows is used again",
    ),
    "other views": (
        lambda x: (torch.tanh(x).view(6, 4), torch.tanh(x).view(8, 3) * 2.0),
        [(24,)],
        "divides dimensions of other sizes",
    ),
    "nothing in common": (
        lambda x, y: (torch.tanh(x), torch.tanh(y)),
        [(8,), (64,)],
        "no value has all rows and columns",
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_what_one_pass_cannot_compute_conflicts(name: str) -> None:
    function, shapes, message = CONFLICTS[name]
    with pytest.raises(Conflict, match=message):
        region_of(function, *shapes)


def test_a_result_with_some_of_the_rows_conflicts() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.tanh(x)
        return z * 2.0, torch.softmax(z + y, -1)

    with pytest.raises(Conflict, match="some of the rows or columns only"):
        region_of(function, (4, 1, 1), (4, 8, 64))
