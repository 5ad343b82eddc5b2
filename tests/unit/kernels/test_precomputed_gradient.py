"""Precomputed gradients on the CPU: they are scaled in place only in the last backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpipe_fast.kernels.precomputed_gradient import (
    CONFIGS,
    choose,
    scale_gradient,
    view_rows,
    with_precomputed_gradient,
)

GRADIENT = torch.arange(6.0).view(2, 3)


def backward(x: Tensor, gradient: Tensor, g: float, retain: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the gradient of x, and the tensor that the forward has overwritten with it."""
    logits = x * 1
    with torch.no_grad():
        logits.copy_(gradient)
    loss = with_precomputed_gradient(logits, gradient.sum())
    (found,) = torch.autograd.grad(loss, x, torch.tensor(g), retain_graph=retain)
    return found, logits.detach()


@pytest.mark.parametrize("g", [1.0, 3.0])
@pytest.mark.parametrize("retain", [False, True])
def test_a_backward_returns_the_scaled_gradient(g: float, retain: bool) -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    found, saved = backward(x, GRADIENT, g, retain)
    assert torch.equal(found, g * GRADIENT)
    # The last backward of a graph scales the saved tensor in place.
    assert torch.equal(saved, GRADIENT if retain else found)


def test_each_row_may_have_a_factor() -> None:
    found = scale_gradient_without_graph(GRADIENT.clone(), torch.tensor([2.0, 0.5]))
    assert torch.equal(found, GRADIENT * torch.tensor([[2.0], [0.5]]))


def scale_gradient_without_graph(gradient: Tensor, g: Tensor) -> Tensor:
    with torch.no_grad():
        return scale_gradient(gradient, g)


def test_narrow_gradients_are_scaled_in_fp32() -> None:
    gradient = torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)
    g = torch.tensor(1 + 2.0**-8)  # rounds to 1 in bfloat16
    found = scale_gradient_without_graph(gradient.clone(), g)
    assert torch.equal(found, (gradient.float() * g).bfloat16())


def test_a_second_derivative_is_refused() -> None:
    with pytest.raises(RuntimeError, match="cannot be differentiated; pass create_graph=False"):
        scale_gradient(GRADIENT, torch.tensor(1.0))


def test_only_tensors_of_disjoint_rows_are_matrices() -> None:
    memory = torch.arange(48.0)
    assert view_rows(memory.view(2, 4, 6)).shape == (8, 6)  # type: ignore[union-attr]
    gaps = memory.view(8, 6)[:, :5]
    assert view_rows(gaps).stride() == (6, 1)  # type: ignore[union-attr]
    assert view_rows(memory[:5]).shape == (1, 5)  # type: ignore[union-attr]
    assert view_rows(memory.view(6, 8).T) is None
    assert view_rows(memory.view(2, 4, 6).transpose(0, 1)) is None
    assert view_rows(memory[:6].expand(8, 6)) is None


def test_wide_rows_have_wide_blocks() -> None:
    narrow, wide = CONFIGS.values()
    assert choose(64) is narrow
    assert choose(65) is choose(1 << 20) is wide
