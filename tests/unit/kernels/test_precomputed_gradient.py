"""Precomputed gradients on the CPU: they are scaled in place only in the last backward."""

from __future__ import annotations

import pytest
import torch

from gpipe_fast.kernels.precomputed_gradient import view_rows, with_precomputed_gradient


@pytest.mark.parametrize("retain", [False, True])
def test_the_last_backward_scales_the_gradient_in_place(retain: bool) -> None:
    gradient, x = torch.arange(6.0).view(2, 3), torch.zeros(2, 3, requires_grad=True)
    logits = x * 1
    with torch.no_grad():
        logits.copy_(gradient)
    loss = with_precomputed_gradient(logits, gradient.sum())
    (found,) = torch.autograd.grad(loss, x, torch.tensor(3.0), retain_graph=retain)
    assert torch.equal(found, 3 * gradient)
    assert torch.equal(logits, gradient if retain else found)


def test_only_tensors_of_disjoint_rows_are_matrices() -> None:
    memory = torch.arange(48.0)
    assert view_rows(memory.view(8, 6)[:, :5]).stride() == (6, 1)  # type: ignore[union-attr]
    for other in (memory.view(6, 8).T, memory.view(2, 4, 6).transpose(0, 1), memory[:6].expand(8, 6)):
        assert view_rows(other) is None
