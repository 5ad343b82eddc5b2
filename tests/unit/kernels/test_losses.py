"""Reductions of the losses of rows, and the arguments that they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpipe_fast.kernels.losses import check, check_reduction, reduce_losses, reduction_scale

LOGITS = torch.linspace(-2, 2, 24).view(2, 3, 4)
TARGET = torch.tensor([[0, 1, 3], [3, 2, 3]])


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_reductions_are_those_of_pytorch(reduction: str, ignore_index: int) -> None:
    logits, target = LOGITS.flatten(0, 1), TARGET.flatten()
    losses = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")
    found = reduce_losses(losses, TARGET, ignore_index, reduction)
    expected = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
    torch.testing.assert_close(found, expected.view(found.shape))
    assert found.shape == (TARGET.shape if reduction == "none" else ())
    count = (target != ignore_index).sum() if reduction == "mean" else 1
    assert reduction_scale(target, ignore_index, reduction) == 1 / torch.as_tensor(count, dtype=torch.float32)


def test_the_mean_of_no_losses_is_not_a_number() -> None:
    ignored = torch.full((2,), -100)
    assert reduce_losses(torch.zeros(2), ignored, -100, "mean").isnan()
    assert reduction_scale(ignored, -100, "mean").isinf()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"source": LOGITS.double()}, r"supports only fp32, fp16 and bf16, got torch\.float64"),
        ({"target": TARGET.int()}, r"class indices in int64, got torch\.int32"),
        ({"target": TARGET[:, :2]}, r"shape of the logits \[2, 3, 4\] without the last .*, got \[2, 2\]"),
        ({"shape": torch.Size()}, "must have the shape of the logits"),
        ({"target": TARGET.to("meta")}, "targets must be on cpu, got meta"),
        ({"label_smoothing": 1.5}, r"label smoothing must be from 0 to 1, got 1\.5"),
    ],
)
def test_arguments_that_do_not_match_are_refused(changed: dict[str, Any], message: str) -> None:
    arguments = {"source": LOGITS, "target": TARGET, "shape": LOGITS.shape, "label_smoothing": 0.1}
    check(**arguments)
    with pytest.raises(ValueError, match=message):
        check(**arguments | changed)


def test_unknown_reductions_are_refused() -> None:
    check_reduction("sum", ("sum", "mean"))
    with pytest.raises(ValueError, match="reduction is not one of sum, mean, got 'max'"):
        check_reduction("max", ("sum", "mean"))
