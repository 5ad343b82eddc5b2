"""Layers that read Python state outside their module: a trace must not freeze its value.

The forward reads each kind of state directly or through a property and a function; the state changes between
calls. A layer whose state can be guarded is traced again for the new value and stays native; any other layer
runs in Python after one warning.
"""

from __future__ import annotations

import itertools
import random
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.equivalence.python_state_cases import (
    CONFIG,
    CONSTANT,
    GUARDED,
    UNGUARDABLE,
    VARIABLE,
    ReadsState,
    ReadsStateIndirectly,
    StateCase,
    reset_state,
)
from tests.sampling import seed


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


def _sample_cases(names: list[str], number: int) -> list[tuple[str, str, str]]:
    """Returns for each kind of state random access paths and checkpoint modes, seeded by the commit."""
    draw = random.Random(seed())
    access_paths, modes = ["directly", "indirectly"], ["always", "except_last", "never"]
    return [
        (name, *rest)
        for name in names
        for rest in draw.sample(list(itertools.product(access_paths, modes)), number)
    ]


@pytest.fixture(autouse=True)
def settings_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, CONFIG.__name__, CONFIG)
    monkeypatch.setenv(VARIABLE, "1")


@pytest.mark.parametrize(("name", "access", "checkpoint"), _sample_cases(list(GUARDED), 1))
def test_a_change_of_guarded_state_is_seen_without_a_warning(name: str, access: str, checkpoint: str) -> None:
    layer_class = ReadsStateIndirectly if access == "indirectly" else ReadsState
    assert _compare_training(GUARDED[name], layer_class, checkpoint, [1.0, 1.0, 2.0, 0.5, 2.0]) == []


@pytest.mark.parametrize(("name", "access", "checkpoint"), _sample_cases(list(CONSTANT), 1))
def test_a_layer_that_reads_constant_objects_stays_native(name: str, access: str, checkpoint: str) -> None:
    layer_class = ReadsStateIndirectly if access == "indirectly" else ReadsState
    assert _compare_training(CONSTANT[name], layer_class, checkpoint, [1.0, 1.0]) == []


@pytest.mark.parametrize(("name", "access", "checkpoint"), _sample_cases(list(UNGUARDABLE), 1))
def test_a_layer_that_reads_unguardable_state_runs_in_python_with_a_warning(
    name: str, access: str, checkpoint: str
) -> None:
    make, reason = UNGUARDABLE[name]
    layer_class = ReadsStateIndirectly if access == "indirectly" else ReadsState
    (warning,) = _compare_training(make(), layer_class, checkpoint, [1.0] * 3)
    assert "layer 1" in warning
    assert reason in warning


@pytest.mark.soak
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("layer_class", [ReadsState, ReadsStateIndirectly])
def test_all_kinds_of_state_in_every_checkpoint_mode(layer_class: type[ReadsState], checkpoint: str) -> None:
    for name, state in GUARDED.items():
        assert _compare_training(state, layer_class, checkpoint, [1.0, 1.0, 2.0, 0.5, 2.0, 1.0]) == [], name
    for name, (make, reason) in UNGUARDABLE.items():
        assert reason in _compare_training(make(), layer_class, checkpoint, [1.0] * 4)[0], name


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
