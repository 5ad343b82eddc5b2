"""The layer that computes the loss of a micro-batch: its shape and dtype, its targets, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.layers.skip import outer_skips
from gpipe_fast.training.losses import Loss, loss_layer, shape_of_loss


@pytest.mark.parametrize(("dim", "shape"), [(0, [1]), (2, [1, 1, 1]), (-1, [1]), (-3, [1, 1, 1])])
def test_a_loss_has_the_batch_dimension(dim: int, shape: list[int]) -> None:
    assert shape_of_loss(dim) == shape


def layer_of(total: Any, keeps_output: bool = False, dim: int = 0) -> nn.Module:
    return loss_layer(Loss(total, "key"), None, 0, keeps_output, dim)


def test_the_loss_of_an_output() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(layer_of(torch.sum)(x), torch.tensor([15.0]))
    assert layer_of(torch.sum, dim=1)(x).shape == (1, 1)


def test_losses_in_half_precision_become_float32() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        assert layer_of(torch.sum)(torch.ones(4, dtype=dtype)).dtype == torch.float32
    assert layer_of(torch.sum)(torch.ones(4, dtype=torch.float64)).dtype == torch.float64


def test_the_output_is_returned_without_its_history() -> None:
    x = torch.ones(4, requires_grad=True)
    loss, output = layer_of(lambda output: output["y"].sum(), keeps_output=True)({"y": x, "n": 3})
    assert loss.requires_grad
    assert not output["y"].requires_grad
    assert output["n"] == 3


@pytest.mark.parametrize("result", [torch.ones(2), 1.0, None])
def test_results_that_are_no_single_number_are_refused(result: Any) -> None:
    with pytest.raises(ValueError, match="loss_fn must return a tensor with one element, got"):
        layer_of(lambda output: result)(torch.ones(4))


def test_targets_are_skip_tensors_that_the_caller_gives() -> None:
    def total(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target, reduction="sum")

    layer = loss_layer(Loss(total, "key"), None, 2, False, 0)
    stashes, pops = outer_skips(layer)
    assert len(stashes) == 0
    assert len(pops) == 2
