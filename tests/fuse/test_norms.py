"""Layer norms that no kernel computes: over several dimensions, or over rows that are too long."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.fuse.families import norms
from gpipe_fast.fuse.launchers import CannotLaunch
from gpipe_fast.fuse.patterns import NUMBERS, Graph
from gpipe_fast.kernels.norms import MAX_COLUMNS, MAX_COLUMNS_DROPOUT
from tests.fuse.graphs import FP32, graph_of

EVERY: list[Any] = list(norms.cases(FP32, FP32))
CASES = [case for case in EVERY if isinstance(case.pattern.__self__, norms.Forward)]
WITHOUT_PARAMETERS = norms.Forward(
    FP32, FP32, (5, 7, 11), norms.Parameters(False, False), False, True, False, False, False
)


@pytest.mark.parametrize("normalized", [(32,), (16, 32)])
def test_only_norms_over_the_last_dimension_match(normalized: tuple[int, ...]) -> None:
    def function(x: Tensor, h: Tensor) -> Tensor:
        return F.layer_norm(x + h, normalized)

    graph = Graph(graph_of(function, (4, 16, 32), (4, 16, 32)))
    assert len(list(graph.matches(WITHOUT_PARAMETERS.case().traced))) == (len(normalized) == 1)


@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: str(case.name))
def test_rows_that_are_too_long_are_left(case: Any) -> None:
    pattern = case.pattern.__self__
    most = MAX_COLUMNS_DROPOUT if pattern.dropout else MAX_COLUMNS
    numbers = {name: number for number, name in NUMBERS.items()}
    for columns in (most, most + 1):
        inputs = [
            torch.empty((3,) if dtype == torch.int64 else (*shape[:-1], columns), dtype=dtype, device="meta")
            for shape, dtype in case.arguments
        ]
        assert (case.fragment(numbers, inputs) is None) == (columns > most)
        if columns > most:
            message = f"rows have {columns} columns, the kernels support {most}"
            with pytest.raises(CannotLaunch, match=message):
                case.launcher(numbers, *inputs)
