"""The last step of a loss, the mean of the losses of rows or its factor, against PyTorch."""

from __future__ import annotations

import pytest
import torch

from gpipe_fast.kernels.mean_loss import CONFIG, launch_loss, launch_scale
from tests.unit.kernels.numerics.comparison import DTYPES, needs_kernels

pytestmark = needs_kernels

IGNORED = -100


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("rows", [1, 5, CONFIG.blocks["SIZE"] + 3])
def test_sums_and_means_match_pytorch(rows: int, mean: bool, dtype: torch.dtype) -> None:
    target = torch.randint(7, (rows,))
    target[1::3] = IGNORED
    losses = torch.rand(rows).where(target != IGNORED, 0.0)
    found = launch_loss(losses, target, IGNORED, mean, dtype)
    expected = losses.double().sum() / ((target != IGNORED).sum() if mean else 1)
    assert (found.shape, found.dtype) == ((), dtype)
    torch.testing.assert_close(
        found, expected.to(dtype), rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=0
    )


@pytest.mark.parametrize("rows", [1, 5, CONFIG.blocks["SIZE"] + 3])
def test_the_factor_of_a_gradient_matches_pytorch(rows: int) -> None:
    target = torch.randint(7, (rows,))
    target[2::4] = IGNORED
    g = torch.tensor(0.7)
    assert torch.equal(launch_scale(g, target, IGNORED), g / (target != IGNORED).sum())
