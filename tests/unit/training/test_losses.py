"""The layer of a loss, what it refuses, and when two losses are the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.training.losses import check_target, key_of, loss_layer, loss_of

CPU = torch.device("cpu")
LOGITS = torch.linspace(-2, 2, 40, dtype=torch.float64).view(8, 5)
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0], dtype=torch.float64)


def test_a_normalizer_divides_a_sum() -> None:
    assert loss_of(F.mse_loss, 3.0).divisor(LOGITS) == 3.0  # type: ignore[misc]
    assert loss_of(F.mse_loss, len).divisor(LOGITS) == 8  # type: ignore[misc]
    assert loss_of(F.mse_loss, 3.0).combines == "sum"
    assert loss_of(F.mse_loss).divisor is None


def weighed(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize(
    "loss_fn",
    [
        F.mse_loss,
        functools.partial(F.mse_loss, reduction="mean"),
        functools.partial(functools.partial(F.mse_loss, target=LOGITS.flip(0))),
        nn.MSELoss(),
        nn.MSELoss(reduction="sum"),
    ],
)
def test_a_normalizer_divides_the_sum_of_a_mean_of_pytorch(loss_fn: Any) -> None:
    target = (
        () if isinstance(loss_fn, functools.partial) and "target" in loss_fn.keywords else (LOGITS.flip(0),)
    )
    found = loss_of(loss_fn, 3).function(LOGITS, *target)
    assert torch.equal(found, F.mse_loss(LOGITS, LOGITS.flip(0), reduction="sum"))
    assert loss_of(weighed, 3).function is weighed


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="loss_fn must be a function of an output and a target, got str"):
        loss_of("mse")
    with pytest.raises(ValueError, match="loss is not one of 'exact', 'per-microbatch', got 'mean'"):
        loss_of(F.mse_loss, None, "mean")


def test_a_missing_target_is_named() -> None:
    check_target(F.mse_loss, LOGITS, "step")
    check_target(lambda output: output.sum(), None, "step")
    check_target(functools.partial(F.mse_loss, target=LOGITS), None, "step")
    with pytest.raises(TypeError, match="step got no target, but mse_loss compares the output with one"):
        check_target(F.mse_loss, None, "step")


def made_by(scale: float) -> Callable[[Tensor], Tensor]:
    return lambda output, factor=1: (output * scale).sum() * factor


def test_functions_from_the_same_line_are_equal_if_their_variables_are() -> None:
    assert key_of(made_by(2.0)) == key_of(made_by(2.0))
    assert key_of(made_by(2.0)) != key_of(made_by(3.0))
    assert key_of(made_by(0.0)) != key_of(made_by(-0.0))
    assert key_of(made_by(1)) != key_of(made_by(True))
    assert key_of(functools.partial(made_by(2.0), factor=2)) == key_of(
        functools.partial(made_by(2.0), factor=2)
    )
    layer = nn.Linear(2, 2)
    assert key_of(layer.forward) == key_of(layer.forward) != key_of(nn.Linear(2, 2).forward)
    assert key_of(nn.MSELoss()) == key_of(nn.MSELoss()) != key_of(nn.L1Loss())
    assert key_of(nn.HuberLoss(delta=2.0)) != key_of(nn.HuberLoss())
    weighted = [nn.CrossEntropyLoss(weight=each) for each in (WEIGHT, WEIGHT, WEIGHT.clone())]
    assert key_of(weighted[0]) == key_of(weighted[1]) != key_of(weighted[2])
    hooked = nn.MSELoss()
    hooked.register_forward_hook(lambda *args: None)
    assert key_of(hooked) != key_of(nn.MSELoss())
    assert key_of(nn.Linear(2, 2)) != key_of(nn.Linear(2, 2))  # with parameters of its own


def layer_of(total: Any, keeps_output: bool = False, dim: int = 0) -> nn.Module:
    return loss_layer(loss_of(total, 1), None, [], keeps_output, dim, CPU)


def test_the_loss_of_an_output() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(layer_of(torch.sum)(x), torch.tensor([15.0]))
    assert layer_of(torch.sum, dim=1)(x).shape == (1, 1)


def test_losses_in_half_precision_become_float32() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        assert layer_of(torch.sum)(torch.ones(4, dtype=dtype)).dtype == torch.float32
    assert layer_of(torch.sum)(torch.ones(4, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("result", [torch.ones(2), 1.0, None])
def test_results_that_are_no_single_number_are_refused(result: Any) -> None:
    with pytest.raises(ValueError, match="loss_fn must return a tensor with one element, got"):
        layer_of(lambda output: result)(torch.ones(4))
