"""Changes of what quantized weights consist of, such as their scales, reach the next call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from tests.quantized import KINDS, WIDTH, blocks
from tests.reference import loop_step, pipeline_step, unequal

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*micro-batches on")]

Change = Callable[[Any], object]


def replace(holder: Any, name: str) -> None:
    setattr(holder, name, (getattr(holder, name) * 2).to(getattr(holder, name).dtype))


def unnest(weight: Any) -> None:
    package = pytest.importorskip("bitsandbytes")
    state = weight.quant_state
    absmax = package.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    state.absmax, state.nested, state.state2, state.offset = absmax * 2, False, None, None


def exchange(weight: Any) -> None:
    state = copy.deepcopy(weight.quant_state)
    state.absmax = state.absmax.flip(0).clone()
    weight.quant_state = state


OWN: dict[str, Change] = {
    "scale in place": lambda weight: weight.state.scale.mul_(2),
    "scale replaced": lambda weight: replace(weight.state, "scale"),
    "inner table replaced": lambda weight: replace(weight.state.inner, "table"),
    "number": lambda weight: replace_number(weight.state),
    "data in place": lambda weight: weight.data.neg_(),
    "data replaced": lambda weight: setattr(weight, "data", -weight.data),
}
NF4: dict[str, Change] = {
    "scales of scales in place": lambda weight: weight.quant_state.state2.absmax.mul_(2),
    "scales of scales replaced": lambda weight: replace(weight.quant_state.state2, "absmax"),
    "scales replaced": lambda weight: replace(weight.quant_state, "absmax"),
    "offset replaced": lambda weight: replace(weight.quant_state, "offset"),
    "type": lambda weight: setattr(weight.quant_state, "quant_type", "fp4"),
    "state replaced": exchange,
    "no double quantization": unnest,
}
INT8: dict[str, Change] = {
    "scale in place": lambda weight: weight.scale.mul_(2),
    "scale replaced": lambda weight: replace(weight, "scale"),
    "data replaced": lambda weight: setattr(weight, "qdata", -weight.qdata),
}
CHANGES = [
    pytest.param(kind, change, id=f"{kind}: {name}")
    for kind, changes in {"own": OWN, "NF4": NF4, "torchao int8": INT8}.items()
    for name, change in changes.items()
]


def replace_number(state: Any) -> None:
    state.bits = 4


@pytest.mark.parametrize(("kind", "change"), CHANGES)
def test_a_change_reaches_the_next_call(kind: str, change: Change) -> None:
    model = blocks(KINDS[kind])
    plain = copy.deepcopy(model)
    pipe, x = GPipe(model, balance=[2, 2], chunks=2, backend="aten"), torch.randn(8, WIDTH)
    before = pipeline_step(pipe, x)
    for each in (model, plain):  # one of several equal layers
        with torch.no_grad():
            change(each[1].up.base.weight)
    after = pipeline_step(pipe, x)
    assert not unequal(after, loop_step(plain, x, 2))
    assert unequal(after, before)


@pytest.mark.parametrize("kind", ["own", "NF4", "torchao int8"])
def test_another_layers_weight_reaches_the_next_call(kind: str) -> None:
    model = blocks(KINDS[kind])
    plain = copy.deepcopy(model)
    pipe, x = GPipe(model, balance=[2, 2], chunks=2, backend="aten"), torch.randn(8, WIDTH)
    pipeline_step(pipe, x)
    for each in (model, plain):
        weight = copy.deepcopy(each[2].up.base.weight)
        each[1].up.base.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, False)
    assert not unequal(pipeline_step(pipe, x), loop_step(plain, x, 2))
