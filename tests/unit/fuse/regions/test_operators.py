"""Operators as expressions or with reductions, and the arguments that neither computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gpipe_fast.fuse.regions.composites import expand
from gpipe_fast.fuse.regions.operators import Unsupported, is_element_wise, literal, map_operator
from gpipe_fast.fuse.regions.values import Constant, Mapped, Value

aten = torch.ops.aten
F32, I64 = torch.float32, torch.int64


def value(dtype: torch.dtype = F32, *shape: int) -> Value:
    return Constant(shape or (2, 3), dtype, "0.0")


def result(dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(2, 3, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("number", "text"),
    [(1.5, "1.5"), (2, "2"), (True, "True"), (math.inf, 'float("inf")'), (-math.inf, 'float("-inf")')],
)
def test_numbers_are_expressions(number: float, text: str) -> None:
    assert literal(number) == text


def test_operators_become_templates() -> None:
    x, y = value(), value()
    found = map_operator(aten.mul.Tensor, {"self": x, "other": y}, result())
    assert isinstance(found, Mapped)
    assert (found.shape, found.dtype, found.operands) == ((2, 3), F32, (x, y))
    assert found.template.format("a", "b") == "a * b"


@pytest.mark.parametrize(
    ("target", "arguments", "dtype"),
    [
        (aten.sin.default, {"self": value(torch.float64)}, torch.float64),
        (aten.exp.default, {"self": value(I64)}, I64),
        (aten._to_copy.default, {"self": value()}, torch.bool),
    ],
)
def test_other_arguments_are_refused(target: Any, arguments: dict[str, Any], dtype: torch.dtype) -> None:
    with pytest.raises(Unsupported):
        map_operator(target, arguments, result(dtype))


def test_products_sums_and_comparisons_are_not_element_wise() -> None:
    assert all(map(is_element_wise, (aten.add.Tensor, aten.gelu.default, aten.clone.default)))
    assert not any(map(is_element_wise, (aten.mm.default, aten.sum.default, aten.gt.Scalar)))


def test_results_that_are_not_needed_are_not_computed() -> None:
    x, statistics = value(), value(F32, 2, 1)
    given = {"grad_out": x, "input": x, "normalized_shape": [3], "mean": statistics, "rstd": statistics}
    found = expand(aten.native_layer_norm_backward.default, given, [torch.empty(2, 3), None, None])
    assert [each is None for each in found] == [False, True, True]
