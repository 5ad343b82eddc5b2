"""The stacks of modes, and the default device."""

from __future__ import annotations

from torch.overrides import BaseTorchFunctionMode

from gpipe_fast.torch_private.fake_tensors import FakeTensorMode
from gpipe_fast.torch_private.modes import (
    TorchDispatchMode,
    dispatch_modes,
    function_modes,
    is_of_a_tracer,
    num_dispatch_modes,
    num_function_modes,
)


class Mode(TorchDispatchMode):
    """A user's mode."""


def test_the_innermost_dispatch_mode_is_the_last() -> None:
    first, last = Mode(), Mode()
    assert dispatch_modes() == []
    with first, last:
        assert dispatch_modes() == [first, last]
        assert num_dispatch_modes() == 2
    assert dispatch_modes() == []


def test_the_innermost_function_mode_is_the_last() -> None:
    first, last = BaseTorchFunctionMode(), BaseTorchFunctionMode()
    before = function_modes()
    with first, last:
        assert function_modes() == [*before, first, last]
        assert num_function_modes() == len(before) + 2


def test_modes_of_tracers_are_told_from_those_of_users() -> None:
    assert is_of_a_tracer(FakeTensorMode())
    assert not is_of_a_tracer(Mode())
