"""Layers that read Python state outside their module: a trace must not freeze its value.

The forward reads each kind of state directly or through a property and a function; the state changes between
calls. A layer whose state can be guarded is traced again for the new value and stays native; any other layer
runs in Python after one warning.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import itertools
import logging
import math
import operator
import pathlib
import re
import sys
import threading
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.contracts.contract_5_nothing_stale.python_state_cases import (
    ALIASED,
    CONFIG,
    GUARDED,
    UNGUARDABLE,
    VARIABLE,
    ReadsState,
    ReadsStateIndirectly,
    StateCase,
    reset_state,
)


@functools.singledispatch
def half_of(value: float) -> float:
    return value / 2


@functools.lru_cache
def cached_half(value: float) -> float:
    return value / 2


class HasCachedProperty:
    @functools.cached_property
    def scale(self) -> float:
        return 1.5


class Pair(NamedTuple):
    scale: float
    other: float


class Level(enum.Enum):
    HIGH = 1.5


def read_under_lock(layer: ReadsState) -> float:
    with layer.held:
        return 1.5


# Objects that layers read and that do not change what the layers compute.
CONSTANT = {
    "lock": StateCase(read_under_lock, held=threading.Lock()),
    "reentrant lock": StateCase(read_under_lock, held=threading.RLock()),
    "logger": StateCase(
        lambda layer: 1.0 + layer.held.isEnabledFor(0), held=logging.getLogger("gpipe_fast_test")
    ),
    "pattern": StateCase(lambda layer: float(layer.held.match("1.5 x")[0]), held=re.compile(r"[\d.]+")),
    "path": StateCase(lambda layer: len(layer.held.parts) / 2, held=pathlib.PurePath("a/b/c")),
    "fraction": StateCase(lambda layer: float(layer.held), held=fractions.Fraction(3, 2)),
    "decimal number": StateCase(lambda layer: float(layer.held), held=decimal.Decimal("1.5")),
    "duration": StateCase(lambda layer: layer.held.total_seconds(), held=datetime.timedelta(seconds=1.5)),
    "attribute getter": StateCase(lambda layer: layer.held(ALIASED), held=operator.attrgetter("scale")),
    "function of a table": StateCase(lambda layer: half_of(3.0)),
    "cached function": StateCase(lambda layer: cached_half(3.0)),
    "cached property": StateCase(lambda layer: layer.held.scale, held=HasCachedProperty()),
    "module of a library": StateCase(lambda layer: layer.held.sqrt(2.25), held=math),
    "NumPy number": StateCase(lambda layer: float(layer.held), held=np.float32(1.5)),
    "named tuple": StateCase(lambda layer: Pair(layer.shared, 2.5).scale),
    "enumeration": StateCase(lambda layer: layer.held.value, held=Level.HIGH),
    "range": StateCase(lambda layer: layer.held.stop / 2, held=range(3)),
    "size": StateCase(lambda layer: layer.held.numel() / 2, held=torch.Size([3])),
}

# Those whose layers stay native. PyTorch's tracer knows no model of the others.
NATIVE = ("pattern", "fraction", "module of a library", "named tuple", "enumeration", "range", "size")
# Those whose reads catch errors of lookups, which PyTorch's tracer does not guard.
CATCHING = ("configuration file", "section of a configuration file")


def _step(run: Callable[[Tensor], Tensor], model: nn.Module, layer: ReadsState, x: Tensor) -> list[Tensor]:
    reset_state(layer)
    model.zero_grad()
    output = run(x)
    output.square().sum().backward()
    return [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def _compare_training(
    state: StateCase, layer_class: type[ReadsState], checkpoint: str, values: list[float]
) -> list[str]:
    """Compares training steps of a pipeline and the loop while the state changes; returns the warnings."""
    torch.manual_seed(0)
    layer = (state.layer_class or layer_class)(state.read, state.held)
    seq = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 2))
    x = torch.randn(6, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = GPipe(seq, [1, 2], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint)
        for value in values:
            state.change(value)
            ours = _step(model, seq, layer, x)
            expected = _step(lambda x: torch.cat([seq(c) for c in x.chunk(3)]), seq, layer, x)
            assert len(ours) == len(expected) == 7
            assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True)), value
    return [str(w.message) for w in caught if "runs in Python" in str(w.message)]


every_access_and_mode = pytest.mark.parametrize(
    ("layer_class", "checkpoint"),
    list(itertools.product([ReadsState, ReadsStateIndirectly], CHECKPOINT_MODES)),
)


@pytest.fixture(autouse=True)
def settings_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, CONFIG.__name__, CONFIG)
    monkeypatch.setenv(VARIABLE, "1")


@pytest.mark.sampled(15)
@every_access_and_mode
@pytest.mark.parametrize("name", GUARDED)
def test_a_change_of_guarded_state_is_seen_without_a_warning(
    name: str, layer_class: type[ReadsState], checkpoint: str
) -> None:
    found = _compare_training(GUARDED[name], layer_class, checkpoint, [1.0, 1.0, 2.0, 0.5, 2.0])
    assert len(found) == (name in CATCHING)


@pytest.mark.sampled(10)
@every_access_and_mode
@pytest.mark.parametrize("name", CONSTANT)
def test_a_layer_that_reads_constant_objects_is_equal(
    name: str, layer_class: type[ReadsState], checkpoint: str
) -> None:
    found = _compare_training(CONSTANT[name], layer_class, checkpoint, [1.0, 1.0])
    assert len(found) <= (name not in NATIVE)


@pytest.mark.sampled(10)
@every_access_and_mode
@pytest.mark.parametrize("name", UNGUARDABLE)
def test_a_layer_that_reads_unguardable_state_runs_in_python_with_a_warning(
    name: str, layer_class: type[ReadsState], checkpoint: str
) -> None:
    (warning,) = _compare_training(UNGUARDABLE[name](), layer_class, checkpoint, [1.0, 1.0, 2.0])
    assert "layer 1" in warning


class AddsConstant(nn.Module):
    """Creates a tensor of the default dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.full((4,), 1 / 3)


def test_a_change_of_the_default_dtype_is_seen() -> None:
    seq = nn.Sequential(nn.Linear(4, 4), AddsConstant())
    model, x = GPipe(seq, [1, 1], devices=["cpu"] * 2, chunks=2), torch.randn(4, 4)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            expected = torch.cat([seq(c) for c in x.chunk(2)])
            assert model(x).dtype == expected.dtype == dtype
            assert torch.equal(model(x), expected)
    finally:
        torch.set_default_dtype(before)
