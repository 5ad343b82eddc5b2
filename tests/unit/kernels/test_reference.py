"""The reference implementations against autograd: losses of rows, and their scaled gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gpipe_fast.kernels import reference

TARGET = torch.tensor([0, 3, -100, 2, 1])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_gradients_are_those_of_autograd(smoothing: float, ignore_index: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    target = TARGET if ignore_index == -100 else TARGET.clamp(0)
    scale = torch.tensor(0.25, dtype=torch.float64)
    losses, gradient = reference.cross_entropy(logits.detach(), target, scale, ignore_index, smoothing)
    expected = F.cross_entropy(
        logits, target, ignore_index=ignore_index, reduction="none", label_smoothing=smoothing
    )
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum() * scale, logits)[0])
    assert torch.equal(gradient[target == ignore_index], torch.zeros_like(gradient[target == ignore_index]))


def test_narrow_logits_are_computed_in_fp32() -> None:
    logits = torch.randn(5, 4).bfloat16()
    losses, gradient = reference.cross_entropy(logits, TARGET, torch.tensor(1.0), -100, 0.0)
    assert (losses.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
    wide, _ = reference.cross_entropy(logits.float(), TARGET, torch.tensor(1.0), -100, 0.0)
    assert torch.equal(losses, wide)
    assert reference.to_fp32_or_wider(logits.double()).dtype == torch.float64


def test_rows_are_scaled_in_place() -> None:
    gradient = torch.ones(2, 3)
    reference.scale_(gradient, torch.tensor([2.0, 3.0]))
    assert gradient.tolist() == [[2.0] * 3, [3.0] * 3]
    reference.scale_(gradient, torch.tensor(0.5))
    assert gradient.tolist() == [[1.0] * 3, [1.5] * 3]
