"""Generated kernels of tensors whose elements lie more than 2^31 - 1 elements apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.kernels.numerics.comparison import DEVICE, needs_kernels
from tests.unit.kernels.numerics.fused_graphs import compare, trace

pytestmark = needs_kernels

DISTANCE, COLUMNS, FP16 = 2**30, 24, torch.float16


@pytest.fixture
def far(tmp_path: Path) -> Tensor:
    """Returns three rows in the second half of a sparse file; a wrapped offset reads zeros in the first."""
    size = 4 * DISTANCE + 2 * COLUMNS
    if DEVICE == "cpu":
        memory = torch.from_file(str(tmp_path / "memory"), shared=True, size=size, dtype=FP16)
    else:
        memory = torch.zeros(size, dtype=FP16)
    rows = memory.as_strided((3, 2 * COLUMNS), (DISTANCE, 1), 2 * DISTANCE)
    return rows.copy_(torch.randn(rows.shape))


def test_halves_of_rows(far: Tensor) -> None:
    compared = trace(lambda a, b: F.silu(a) * b, [*far.chunk(2, -1)], gradients=False)
    assert not compared.left()
    compare(compared, [*far.chunk(2, -1)])


def test_columns_as_rows(far: Tensor) -> None:
    """The elements of each row that is normalized lie far apart."""
    x = far.t()
    compared = trace(lambda x: torch.softmax(0.5 * x, -1), [x], gradients=False)
    assert not compared.left()
    compare(compared, [x])
