"""The addition of partial sums against PyTorch."""

from __future__ import annotations

import pytest
import torch

from gpipe_fast.kernels.partial_sums import launch_partial_sums
from tests.unit.kernels.numerics.comparison import DEVICE, needs_kernels

pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("programs", "columns"), [(1, 5), (64, 33), (132, 70), (65, 32), (0, 40), (3, 0)])
def test_sums_of_rows_match_pytorch(dtype: torch.dtype, programs: int, columns: int) -> None:
    matrix = torch.randn(programs, columns, device=DEVICE)
    # The interpreter adds rows one by one, PyTorch pairwise.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-3
    expected = matrix.double().sum(0).to(dtype)
    torch.testing.assert_close(launch_partial_sums(matrix, dtype), expected, rtol=tolerance, atol=tolerance)
