"""Losses as a sum and a divisor: those of PyTorch, those of users, and when two are the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.training.losses import Loss, check_target, key_of, loss_layer, loss_of

LOGITS = torch.linspace(-2, 2, 40, dtype=torch.float64).view(8, 5)
CLASSES = torch.tensor([0, 1, 2, -100, 4, 0, -100, 1])
PROBABILITIES = LOGITS.flip(0).softmax(-1)
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0], dtype=torch.float64)

LOSSES: dict[str, tuple[Any, Tensor, Tensor]] = {
    "classes": (F.cross_entropy, LOGITS, CLASSES),
    "module": (nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1), LOGITS, CLASSES.clamp(0)),
    "weighted classes": (nn.CrossEntropyLoss(weight=WEIGHT), LOGITS, CLASSES),
    "probabilities": (F.cross_entropy, LOGITS, PROBABILITIES),
    "nll": (functools.partial(F.nll_loss, weight=WEIGHT), LOGITS.log_softmax(-1), CLASSES),
    "elements": (F.mse_loss, LOGITS, PROBABILITIES),
    "huber": (nn.HuberLoss(delta=0.3), LOGITS, PROBABILITIES),
    "logits": (nn.BCEWithLogitsLoss(), LOGITS, PROBABILITIES),
    "partial": (functools.partial(F.smooth_l1_loss, beta=0.5), LOGITS, PROBABILITIES),
}


@pytest.mark.parametrize("name", LOSSES)
def test_sums_of_unequal_micro_batches_divided_once_are_the_mean(name: str) -> None:
    loss_fn, output, target = LOSSES[name]
    loss = loss_of(loss_fn, None)
    assert loss.divisor is not None
    total = sum(loss.total(output[part], target[part]) for part in (slice(0, 3), slice(3, 8)))
    torch.testing.assert_close(total / loss.divisor(target), loss_fn(output, target))


def test_a_sum_is_not_divided() -> None:
    assert loss_of(nn.MSELoss(reduction="sum"), None).divisor is None
    assert loss_of(functools.partial(F.mse_loss, reduction="sum"), None).divisor is None


def test_a_normalizer_replaces_the_divisor() -> None:
    assert loss_of(F.mse_loss, 3.0).divisor(LOGITS) == 3.0  # type: ignore[misc]
    assert loss_of(F.mse_loss, len).divisor(LOGITS) == 8  # type: ignore[misc]
    own = loss_of(lambda output: output.sum(), 2)
    assert own.total(LOGITS) == LOGITS.sum()


@pytest.mark.parametrize(
    ("loss_fn", "kind", "message"),
    [
        (nn.MSELoss(reduction="none"), ValueError, "got reduction='none'; pass 'mean' or 'sum'"),
        (functools.partial(F.mse_loss, weight=WEIGHT), ValueError, "mse_loss got weight="),
        (functools.partial(F.mse_loss, reduce=True), ValueError, "the divisor of partial is not known"),
    ],
)
def test_losses_that_cannot_be_combined_are_refused(loss_fn: Any, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        loss_of(loss_fn, None)


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
    assert loss_of(nn.MSELoss(), None).key == loss_of(F.mse_loss, None).key
    assert loss_of(nn.HuberLoss(delta=2.0), None).key != loss_of(nn.HuberLoss(), None).key


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


@pytest.mark.parametrize("result", [torch.ones(2), 1.0, None])
def test_results_that_are_no_single_number_are_refused(result: Any) -> None:
    with pytest.raises(ValueError, match="loss_fn must return a tensor with one element, got"):
        layer_of(lambda output: result)(torch.ones(4))
