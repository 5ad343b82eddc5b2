"""Steps that launch kernels, and steps that check once what kernels compute; without a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpipe_fast._extension import Arena, Kernel, Layout, Program, Value

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
Check = Callable[[list[Tensor], list[Tensor]], bool]


def doubling_program(check: Check) -> Program:
    """Returns a program that doubles a vector, and then checks the result."""
    program, layout = Program(Arena(), CPU), Layout([3], [1], torch.float32)
    given, doubled = program.add_input(layout), program.add_result(layout)
    program.add_operator("aten::add", "Tensor", [Value(given), Value(given), 1], [doubled])
    program.add_check(check, [Value(given)], [Value(doubled)])
    program.set_outputs([doubled])
    return program


def run(program: Program, x: Tensor) -> Tensor:
    (output,), _ = program.run([x], [], True)
    return output


def test_a_check_is_called_once_with_inputs_and_outputs() -> None:
    seen: list[tuple[list[Tensor], list[Tensor]]] = []
    program = doubling_program(lambda inputs, outputs: seen.append((inputs, outputs)) is None)
    for value in (1.0, 2.0, 3.0):
        assert torch.equal(run(program, torch.full((3,), value)), torch.full((3,), 2 * value))
    (([given], [computed]),) = seen
    assert torch.equal(given, torch.ones(3))
    assert torch.equal(computed, torch.full((3,), 2.0))


def test_a_check_that_raises_or_is_not_done_is_repeated_and_may_change_the_outputs() -> None:
    calls = []

    def set_to_zero(inputs: list[Tensor], outputs: list[Tensor]) -> bool:
        calls.append(len(inputs))
        if len(calls) == 1:
            raise ArithmeticError("a kernel differs")
        outputs[0].zero_()
        return len(calls) == 3

    program, x = doubling_program(set_to_zero), torch.ones(3)
    with pytest.raises(ArithmeticError, match="a kernel differs"):
        run(program, x)
    assert [run(program, x)[0].item() for _ in range(3)] == [0.0, 0.0, 2.0]


@pytest.mark.parametrize("is_run", [True, False], ids=["run", "pending"])
def test_a_check_is_released(is_run: bool) -> None:
    """After it has returned, or else with its program."""

    class Passes:
        def __call__(self, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
            return True

    check = Passes()
    released = weakref.ref(check)
    program: Program | None = doubling_program(check)
    del check
    assert released() is not None
    if is_run:
        assert program is not None
        run(program, torch.ones(3))
    else:
        program = None
    gc.collect()
    assert released() is None


def test_kernels_are_not_loaded_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="loads no kernels on cpu devices, got kernel scale for cpu"):
        Kernel(b"", "scale", 128, 1, 0, False, False, CPU)
