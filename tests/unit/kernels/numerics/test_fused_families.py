"""The launchers of fused cases against their patterns, at the patterns' sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from gpipe_fast.fuse.families import losses, rotary
from gpipe_fast.fuse.family import Case
from gpipe_fast.fuse.launchers import CannotLaunch
from gpipe_fast.fuse.patterns import CLASSES, IGNORE_INDEX, NUMBERS
from tests.unit.kernels.numerics.comparison import DEVICE, check, needs_kernels

pytestmark = needs_kernels

MIXES = ((torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float32, torch.float16))
# The numbers of the patterns themselves.
OWN_NUMBERS = {name: number for number, name in NUMBERS.items()}


def _computes(case: Case) -> bool:
    # PyTorch has no log-softmax from fp16 to fp32 on the CPU.
    form = getattr(case.pattern.__self__, "form", None)  # type: ignore[attr-defined]
    return DEVICE != "cpu" or getattr(form, "cast", "") != "fused"


def cases_of(family: Any) -> list[Any]:
    """Returns a parameter for each case of a family."""
    return [
        pytest.param(case, id=f"{case.name}-{case.phase}-{stream}-{own}-{i}".replace("torch.", ""))
        for stream, own in MIXES
        for i, case in enumerate(filter(_computes, family.cases(stream, own)))
    ]


def random_inputs(case: Case) -> list[Tensor]:
    """Returns random arguments of a pattern: targets, two of which are ignored, and normal numbers."""
    inputs = []
    for shape, dtype in case.arguments:
        if dtype == torch.int64:
            inputs.append(torch.randint(CLASSES, shape))
            inputs[-1][1:3] = IGNORE_INDEX
        else:
            inputs.append(torch.randn(shape).to(dtype))
    return [t.to(DEVICE) for t in inputs]


def compare_with_pattern(case: Case) -> None:
    """Compares shapes, dtypes and values of a launcher's results with its pattern's."""
    inputs = random_inputs(case)
    unrounded = list(inputs)
    if "saved" in case.name:
        unrounded[1] = torch.log_softmax(inputs[1].double(), -1)
        inputs[1] = unrounded[1].to(inputs[1].dtype)
    found, expected = case.launcher(OWN_NUMBERS, *inputs), _tuple(case.pattern(*inputs))
    pattern: Any = case.pattern
    wide: Any = getattr(_in_float64(pattern.__self__), pattern.__name__)
    exact = _tuple(wide(*(t.double() if t.is_floating_point() else t for t in unrounded)))
    check(list(found), list(expected), list(exact))


def _tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


def _in_float64(described: Any) -> Any:
    """Returns a case's description with float64 in place of every dtype."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(described):
        value = getattr(described, field.name)
        if isinstance(value, torch.dtype):
            changed[field.name] = torch.float64
        elif dataclasses.is_dataclass(value):
            changed[field.name] = _in_float64(value)
        elif value == "fused":  # GPUs have no log-softmax from float64
            changed[field.name] = "before"
    return dataclasses.replace(described, **changed)


@pytest.mark.parametrize("case", cases_of(losses))
def test_losses_and_their_gradients_equal_their_patterns(case: Case) -> None:
    compare_with_pattern(case)


@pytest.mark.parametrize("case", cases_of(rotary))
def test_rotary_embeddings_and_their_gradients_equal_their_patterns(case: Case) -> None:
    compare_with_pattern(case)


def test_weights_that_are_no_label_smoothing_are_not_fused() -> None:
    loss = losses.Loss(losses.Form(torch.float32, torch.float32, "own", (4, 8)), losses.MEAN, True)
    numbers = {**OWN_NUMBERS, "class_weight": 0.5}
    with pytest.raises(CannotLaunch, match="do not sum to 1"):
        loss.launch_forward(numbers, torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))
