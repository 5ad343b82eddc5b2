"""The launchers that stages call, with a dtype for each tensor and with optional results, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpipe_fast.kernels.cross_entropy import launch_gradient, launch_losses
from gpipe_fast.kernels.rotate_half import launch_rotate_half
from tests.unit.kernels.numerics.comparison import (
    check,
    needs_kernels,
    noncontiguous,
    outputs_and_gradients,
    to_float64,
)

pytestmark = needs_kernels

FP16, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def eager_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns what transformers computes."""
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


@pytest.mark.parametrize("tables", [1, 2], ids=["one table", "a table per sequence"])
@pytest.mark.parametrize("head_dim", [6, 64, 160])
@pytest.mark.parametrize(
    "dtypes",
    [(FP32, FP32), (FP16, FP16), (FP16, FP32), (BF16, FP32)],
    ids=["fp32", "fp16", "autocast", "bf16"],
)
def test_rotate_half_matches_pytorch(
    dtypes: tuple[torch.dtype, torch.dtype], head_dim: int, tables: int
) -> None:
    q = torch.randn(2, 5, 9, head_dim).transpose(1, 2).to(dtypes[0])
    k = noncontiguous(torch.randn(2, 3, 5, head_dim).to(dtypes[0]))
    # The halves of the tables differ.
    cos, sin = torch.randn(2, tables, 5, head_dim).to(dtypes[1])
    dq, dk = torch.randn_like(q, dtype=dtypes[1]), torch.randn_like(k, dtype=dtypes[1])

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dq: Tensor, dk: Tensor) -> list[Tensor]:
        both = lambda q, k: [eager_rotary(x, cos, sin) for x in (q, k)]  # noqa: E731
        return [
            t.to(torch.promote_types(t.dtype, FP32)) for t in outputs_and_gradients(both, [q, k], [dq, dk])
        ]

    own = {"q_dtype": FP32, "k_dtype": FP32}
    found = [*launch_rotate_half(q, k, cos, sin, **own), *launch_rotate_half(dq, dk, cos, sin, True, **own)]
    given = [q, k, cos, sin, dq, dk]
    check(found, run(*given), run(*to_float64(given)))
    assert found[0].stride() == q.stride()
    alone, absent = launch_rotate_half(q, None, cos, sin, q_dtype=FP32)
    assert torch.equal(alone, found[0])
    assert absent is None


def test_an_empty_loss_and_an_empty_rotation_launch_nothing() -> None:
    empty = torch.empty(0, 10)
    assert launch_losses(empty, torch.empty(0, dtype=torch.int64)).shape == (0,)
    assert launch_gradient(empty, torch.empty(0, dtype=torch.int64), torch.ones(())).shape == (0, 10)
    q, _ = launch_rotate_half(torch.empty(2, 3, 0, 8), None, *torch.empty(2, 1, 0, 8))
    assert q.shape == (2, 3, 0, 8)
