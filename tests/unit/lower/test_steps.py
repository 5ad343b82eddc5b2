"""The steps of a program: the values that each uses and writes."""

from __future__ import annotations

import pytest
import torch

from gpipe_fast._extension import ActiveRuns
from gpipe_fast._extension import Value as NativeValue
from gpipe_fast.lower.steps import (
    Accumulate,
    AccumulateAll,
    AdoptAsAccumulator,
    Allocate,
    Call,
    Check,
    Ref,
    Release,
    Step,
    is_written,
    native,
    values_in,
    values_used,
    values_written,
)

aten, ALWAYS = torch.ops.aten, ActiveRuns.ALWAYS
STEPS: dict[str, tuple[Step, list[int], list[int]]] = {
    "call": (Call(aten.add.Tensor, (Ref(1), Ref(2)), (3,), ALWAYS, 0), [1, 2, 3], [3]),
    "call of a list": (Call(aten.cat.default, ([Ref(1), Ref(2)], 0), (3,), ALWAYS, None), [1, 2, 3], [3]),
    "unused result": (Call(aten.max.dim, (Ref(1), 0), (None, 2), ALWAYS, 0), [1, 2], [2]),
    "call into an argument": (
        Call(aten.mm.out, (Ref(1), Ref(2), Ref(3)), None, ALWAYS, 0), [1, 2, 3], [3],
    ),
    "check": (Check(lambda inputs, results: True, (1, 2), (3,)), [1, 2, 3], [3]),
    "allocate": (Allocate(4, ALWAYS), [4], [4]),
    "accumulate": (Accumulate(1, 2, ALWAYS), [1, 2], []),
    "accumulate all": (AccumulateAll((1, 3), (2, 4), ALWAYS), [1, 3, 2, 4], []),
    "adopt": (AdoptAsAccumulator(1, 2), [1, 2], []),
    "release": (Release(1), [1], []),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_values_that_a_step_uses_and_writes(name: str) -> None:
    step, used, written = STEPS[name]
    assert values_used(step) == used
    assert values_written(step) == written


def test_values_are_found_in_nested_arguments() -> None:
    assert values_in((Ref(1), [2, Ref(3), (Ref(4), None)])) == [1, 3, 4]
    assert values_in("text") == []


def test_native_arguments_are_made_once() -> None:
    call = Call(aten.cat.default, ([Ref(1), Ref(2)], 0), (3,), ALWAYS, None)
    tensors, dim = call.native_arguments
    assert [value.slot for value in tensors] == [1, 2]
    assert dim == 0
    assert call.native_arguments is call.native_arguments
    assert isinstance(native(Ref(5)), NativeValue)


def test_written_arguments_are_those_of_the_schema() -> None:
    assert [is_written(each) for each in aten.add.out._schema.arguments] == [False, False, False, True]
