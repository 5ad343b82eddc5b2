"""Compares the launchers of fused cases with their patterns, at the patterns' sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpipe_fast.fuse.family import Case
from gpipe_fast.fuse.patterns import NUMBERS
from tests.unit.kernels.numerics.comparison import DEVICE, check

MIXES = ((torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float32, torch.float16))
# The numbers of the patterns themselves.
OWN_NUMBERS = {name: number for number, name in NUMBERS.items()}


def cases_of(family: Any, where: Callable[[Case], bool]) -> list[Any]:
    """Returns a parameter for each case of a family."""
    found = []
    for stream, own in MIXES:
        cases = [case for case in family.cases(stream, own) if where(case)]
        for i, case in enumerate(cases):
            found.append(pytest.param(case, id=f"{case.name}-{stream}-{own}-{i}".replace("torch.", "")))
    return found


def random_inputs(case: Case, num_classes: int = 2) -> list[Tensor]:
    """Returns random arguments of a pattern: keys, targets below `num_classes`, and normal numbers."""
    return [_random(shape, dtype, num_classes).to(DEVICE) for shape, dtype in case.arguments]


def _random(shape: tuple[int, ...], dtype: torch.dtype, num_classes: int) -> Tensor:
    if dtype == torch.int64:
        return torch.tensor([2**40 + 1, 3, 5]) if shape == (3,) else torch.randint(num_classes, shape)
    return torch.randn(shape).to(dtype)


def compare_with_pattern(case: Case, inputs: list[Tensor], unrounded: list[Tensor] | None = None) -> None:
    """Compares shapes, dtypes and values of a launcher's results with its pattern's.

    Args:
        case: the case.
        inputs: the arguments of the pattern.
        unrounded: the arguments before they were rounded to their dtypes, if they were.
    """
    found, expected = case.launcher(OWN_NUMBERS, *inputs), _tuple(case.pattern(*inputs))
    pattern: Any = case.pattern
    wide: Any = getattr(_in_float64(pattern.__self__), pattern.__name__)
    exact = _tuple(wide(*(t.double() if t.is_floating_point() else t for t in unrounded or inputs)))
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
    return dataclasses.replace(described, **changed)
