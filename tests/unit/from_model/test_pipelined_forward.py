"""The forward of pipelined models: it may be wrapped, and not replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from gpipe_fast.from_model.pipelined import PipelinedForward


def run(model: Any, x: int) -> str:
    return f"pipeline of {model.name}({x})"


class Model:
    """Stands in for a pipelined model."""

    forward = PipelinedForward(run)
    _wrapper: Any = None

    def __init__(self, name: str = "a") -> None:
        self.name = name


def wrapped(forward: Callable[[int], str]) -> Callable[[int], str]:
    @functools.wraps(forward)
    def wrapper(x: int) -> str:
        return f"wrapped {forward(x)}"

    return wrapper


def test_a_model_has_a_bound_forward_and_the_class_a_function() -> None:
    model = Model()
    assert model.forward(3) == "pipeline of a(3)"
    assert Model.forward is run


def test_wrappers_belong_to_one_model_and_may_be_removed() -> None:
    model, other = Model(), Model("b")
    model.forward = wrapped(model.forward)
    model.forward = wrapped(model.forward)
    assert model.forward(3) == "wrapped wrapped pipeline of a(3)"
    assert other.forward(3) == "pipeline of b(3)"
    assert "forward" not in vars(model)
    del model.forward
    assert model.forward(3) == "pipeline of a(3)"


def test_a_forward_that_does_not_call_the_pipeline_is_refused() -> None:
    model = Model()
    for other in (lambda x: x, wrapped(lambda x: "other")):
        with pytest.raises(TypeError, match="denied to replace forward of a pipelined Model"):
            model.forward = other
    assert model.forward(3) == "pipeline of a(3)"
