"""The fused cases of cross-entropy against their patterns."""

from __future__ import annotations

import pytest
import torch

from gpipe_fast.fuse.families import losses
from gpipe_fast.fuse.family import Case
from gpipe_fast.fuse.launchers import CannotLaunch
from gpipe_fast.fuse.patterns import CLASSES, IGNORE_INDEX
from tests.unit.kernels.numerics.comparison import DEVICE, needs_kernels
from tests.unit.kernels.numerics.fused_cases import OWN_NUMBERS, cases_of, compare_with_pattern, random_inputs

pytestmark = needs_kernels


def _computes(case: Case) -> bool:
    # PyTorch has no log-softmax from fp16 to fp32 on the CPU.
    loss: losses.Loss | losses.SavedLoss = case.pattern.__self__  # type: ignore[attr-defined]
    return loss.form.cast != "fused" or DEVICE != "cpu"


def _compare(case: Case) -> None:
    inputs = random_inputs(case, CLASSES)
    targets = next(t for t in inputs if t.dtype == torch.int64)
    targets[1:3] = IGNORE_INDEX
    unrounded = list(inputs)
    if "saved" in case.name:
        unrounded[1] = torch.log_softmax(inputs[1].double(), -1)
        inputs[1] = unrounded[1].to(inputs[1].dtype)
    compare_with_pattern(case, inputs, unrounded)


@pytest.mark.parametrize("case", cases_of(losses, lambda case: case.phase == 1 and _computes(case)))
def test_losses_equal_their_patterns(case: Case) -> None:
    _compare(case)


@pytest.mark.parametrize("case", cases_of(losses, lambda case: case.phase == 0 and _computes(case)))
def test_gradients_of_losses_equal_their_patterns(case: Case) -> None:
    _compare(case)


def test_weights_that_are_no_label_smoothing_are_not_fused() -> None:
    loss = losses.Loss(losses.Form(torch.float32, torch.float32, "own", (4, 8)), losses.MEAN, True)
    numbers = {**OWN_NUMBERS, "class_weight": 0.5}
    with pytest.raises(CannotLaunch, match="do not sum to 1"):
        loss.launch_forward(numbers, torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))
