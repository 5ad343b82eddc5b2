"""Rules for losses: exact for any split of the batch, or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.from_model.loss_rules import Rule, combine, find_rule
from tests.unit.from_model.recording import Calls, record_of

LINEAR = nn.Linear(5, 7)
Loss = Callable[[Tensor, Tensor], Tensor]


def rule_of(loss: Loss, targets: Tensor) -> Rule | None:
    model = Calls(lambda x, y: loss(LINEAR(x), y), [LINEAR])
    flow = record_of(model, torch.empty(4, 3, 5), targets, split=[0, 1])
    return find_rule(flow, next(flow.result.refs()), ())


CLASSES = torch.zeros(4, 3, dtype=torch.long)
NUMBERS = torch.zeros(4, 3, 7)


def causal(x: Tensor, y: Tensor) -> Tensor:
    shifted = F.pad(y, (0, 1), value=-1)[:, 1:]
    return F.cross_entropy(x.flatten(0, 1), shifted.flatten(), ignore_index=-1)


def masked_mean(x: Tensor, y: Tensor) -> Tensor:
    return (x.mean(-1) * y).sum() / y.sum()


def masked_sum_of_means(x: Tensor, y: Tensor) -> Tensor:
    return (x.mean(-1) * y).sum() / y.sum() + x.mean()


@pytest.mark.parametrize(
    ("loss", "targets", "kind"),
    [
        (lambda x, y: F.mse_loss(x, y), NUMBERS, "samples"),
        (lambda x, y: F.mse_loss(x, y, reduction="sum"), NUMBERS, "sum"),
        (lambda x, y: (x - y).square().mean() + 0.1 * x.abs().mean(), NUMBERS, "samples"),
        (lambda x, y: F.kl_div(x, y, reduction="batchmean"), NUMBERS, "samples"),
        (lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()), CLASSES, "targets"),
        (lambda x, y: nn.CrossEntropyLoss()(x.transpose(1, 2), y), CLASSES, "targets"),
        (lambda x, y: F.nll_loss(x.flatten(0, 1), y.flatten()), CLASSES, "targets"),
        (lambda x, y: 2 * F.cross_entropy(x.flatten(0, 1), y.flatten()), CLASSES, "targets"),
        (lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum"), CLASSES, "sum"),
        (causal, CLASSES, "targets"),
        (masked_mean, CLASSES, "quotient"),
        (lambda x, y: (x[..., 0] * y).sum() / (y.sum().clamp(min=1) + 1e-6), CLASSES, "quotient"),
        # None of these is a sum over samples, divided by something that the inputs decide.
        (lambda x, y: F.mse_loss(x, y).sqrt(), NUMBERS, None),
        (lambda x, y: x.std(), NUMBERS, None),
        (lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()) + x.mean(), CLASSES, None),
        (masked_sum_of_means, CLASSES, None),
        (lambda x, y: x.square().sum() / x.abs().sum(), NUMBERS, None),
        (lambda x, y: x.softmax(0).amax(), NUMBERS, None),
    ],
)
def test_the_rule_of_a_loss(loss: Loss, targets: Tensor, kind: str | None) -> None:
    rule = rule_of(loss, targets)
    assert (rule and rule.kind) == kind


@pytest.mark.parametrize(
    ("loss", "targets"), [(lambda x, y: (x - y).square().mean(), NUMBERS), (causal, CLASSES)]
)
def test_a_rule_is_found_on_the_cpu_in_spite_of_a_default_device(loss: Loss, targets: Tensor) -> None:
    with torch.device("meta"):
        assert rule_of(loss, targets) is not None


def test_a_part_without_targets_has_no_part_in_the_sum() -> None:
    parts = torch.tensor([2.0, torch.nan, 4.0], requires_grad=True)
    total = combine(parts, [0.5, 0.0, 0.5])
    total.backward()
    assert total.item() == 3
    assert parts.grad is not None
    assert parts.grad.tolist() == [0.5, 0, 0.5]
