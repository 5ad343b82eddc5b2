"""The addition of partial sums against PyTorch."""

from __future__ import annotations

import pytest
import torch

from gpipe_fast.kernels.partial_sums import MAX_MATRICES, launch_partial_sums
from tests.unit.kernels.numerics.comparison import DEVICE, needs_kernels

pytestmark = needs_kernels

FP16, FP32 = torch.float16, torch.float32
DTYPES = (FP16, FP32, None)


@pytest.mark.parametrize("count", range(1, MAX_MATRICES + 1))
@pytest.mark.parametrize(("programs", "columns"), [(1, 5), (64, 33), (132, 70), (65, 32)])
def test_sums_of_matrices_match_pytorch(count: int, programs: int, columns: int) -> None:
    matrices = list(torch.randn(count, programs, columns, device=DEVICE))
    found = launch_partial_sums(matrices, DTYPES[:count])
    dtypes = [dtype or FP32 for dtype in DTYPES[:count]]
    assert [t.dtype for t in found] == dtypes
    for total, matrix, dtype in zip(found, matrices, dtypes, strict=True):
        # The interpreter adds rows one by one, PyTorch pairwise.
        tolerance = 1e-5 if dtype == FP32 else 1e-3
        torch.testing.assert_close(total, matrix.double().sum(0).to(dtype), rtol=tolerance, atol=tolerance)


def test_absent_matrices_have_no_sums_and_no_programs_sum_to_zero() -> None:
    matrix = torch.randn(3, 7, device=DEVICE)
    first, absent, last = launch_partial_sums([2 * matrix, None, matrix], DTYPES)
    assert absent is None
    assert torch.equal(first, (2 * last).half())
    (found,) = launch_partial_sums([torch.empty(0, 40, device=DEVICE)], [None])
    assert torch.equal(found, torch.zeros(40, device=DEVICE))
    (empty,) = launch_partial_sums([torch.empty(3, 0, device=DEVICE)], [FP16])
    assert empty.shape == (0,)
