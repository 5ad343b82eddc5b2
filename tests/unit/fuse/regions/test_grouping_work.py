"""What a unit's arithmetic costs: functions more than operations, draws more than functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from gpipe_fast.fuse.regions.grouping import BYTES_PER_FUNCTION, BYTES_PER_OPERATION, reduces, work_of
from gpipe_fast.fuse.regions.values import Mapped, Reduced, Value

F32 = torch.float32


def mapped(template: str, *shape: int) -> Mapped:
    return Mapped(shape, F32, template, (), F32)


def unit(*values: Value) -> Any:
    return SimpleNamespace(values=values)


def test_functions_count_more_than_operations() -> None:
    assert work_of(unit(mapped("{0} + {1}", 100, 10))) == round(1000 * BYTES_PER_OPERATION)
    one = work_of(unit(mapped("tl.exp({0})", 100, 10)))
    assert one == round(1000 * (BYTES_PER_OPERATION + BYTES_PER_FUNCTION))
    assert work_of(unit(mapped("tl.exp(tl.log({0}))", 100, 10))) == one + 1000 * BYTES_PER_FUNCTION


def test_a_choice_is_no_function() -> None:
    choice = mapped("tl.where({0} > 0, {0}, 0.0)", 100, 10)
    assert work_of(unit(choice)) == round(1000 * BYTES_PER_OPERATION)


def test_the_work_of_all_values_is_added() -> None:
    first, second = mapped("{0} + {1}", 1000), mapped("tl.exp({0})", 1000)
    assert work_of(unit(first, second)) == work_of(unit(first)) + work_of(unit(second))


def test_reductions_are_free_and_reduce() -> None:
    value = mapped("{0}", 100, 10)
    total = Reduced((100, 1), F32, "sum", value, (1,))
    assert work_of(unit(total)) == 0
    assert reduces(unit(value, total))
    assert not reduces(unit(value))
