"""Layers in Python: their exceptions are raised unchanged; warnings and rejections name the layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.internals import compiler_of
from tests.reference import (
    loop_step,
    pipeline_step,
    unequal,
)
from tests.untraceable import (
    WIDTH,
    FunctionLayer,
    Recurrent,
    branch_on_data,
    features,
    model,
    segments_by_stage,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_one_warning_names_stage_layer_and_reason() -> None:
    pipe = GPipe(model(FunctionLayer(branch_on_data), Recurrent(nn.GRU)), [3, 8], chunks=8)
    pipe.eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in (8, 8, 16):
            pipe(features(batch))
    # PyTorch warns once per process about a branch on a tensor that requires a gradient.
    caught = [warning for warning in caught if "to a scalar may" not in str(warning.message)]
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 2, messages
    assert any(
        "stage 0, layer 2 (FunctionLayer) runs in Python: " in m and "data-dependent" in m.lower()
        for m in messages
    )
    assert any("stage 1, layer 6 (Recurrent) runs in Python: GRU inner: recurrent" in m for m in messages)
    assert {warning.filename for warning in caught} == {__file__}


def about_python(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """Returns the warnings about layers in Python; others are given once per process."""
    return [str(each.message) for each in caught if "runs in Python" in str(each.message)]


def check_width(f: nn.Module, x: Tensor) -> Tensor:
    if x.shape[-1] != WIDTH:
        raise ValueError(f"expected {WIDTH} features")
    y: Tensor = f(x)
    return y


@pytest.mark.parametrize(
    ("function", "error"),
    [(lambda f, x: f(x), "mat1 and mat2 shapes cannot be multiplied"), (check_width, "expected 8 features")],
)
def test_an_invalid_call_leaves_every_layer_lowered(function: Callable[..., Any], error: str) -> None:
    layers = nn.Sequential(nn.Tanh(), FunctionLayer(function), nn.ReLU())
    pipe = GPipe(layers, [1, 2], chunks=2)
    bad_input = torch.zeros(4, WIDTH + 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in (4, 6, 8):
            with pytest.raises((RuntimeError, ValueError), match=error):
                pipe(bad_input)
            traces = compiler_of(pipe).num_traces
            assert unequal(pipeline_step(pipe, features(batch)), loop_step(layers, features(batch), 2)) == []
            assert compiler_of(pipe).num_traces > traces
            assert segments_by_stage(pipe) == [[(0, 1, True)], [(0, 2, True)]]
    assert about_python(caught) == []


def test_a_layer_that_rejects_its_first_inputs_is_not_yet_warned_about() -> None:
    def reject_large_values(f: nn.Module, x: Tensor) -> Tensor:
        if float(x.max()) > 1e3:
            raise ValueError("too large")
        y: Tensor = f(x)
        return y

    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), FunctionLayer(reject_large_values))
    pipe = GPipe(nn.Sequential(FunctionLayer(reject_large_values), *layers), [2, 2], chunks=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with pytest.raises(ValueError, match="too large"):
                pipe(features() * 1e4)
        assert about_python(caught) == []
        pipe(features())
    (message,) = about_python(caught)
    assert "stage 0, layer 0 (FunctionLayer) runs in Python: " in message
