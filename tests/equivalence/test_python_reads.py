"""Layers that read Python state outside their module: a trace must not freeze its value.

The forward reads each kind of state directly or through a property and a function; the state changes between
calls. A layer whose state can be guarded is traced again for the new value and stays native; any other layer
runs in Python after one warning.
"""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import datetime
import functools
import itertools
import math
import os
import random
import sys
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.sampling import seed

SCALE = 1.0
NESTED = {"scale": [1.0]}
COUNTER = 0
LOG: list[int] = []
QUEUE: collections.deque[float] = collections.deque([1.0], maxlen=3)
CONFIG = types.ModuleType("settings_of_a_test")
CONFIG.scale = 1.0  # type: ignore[attr-defined]
GENERATOR, NUMPY = random.Random(0), np.random.default_rng(0)
VARIABLE = "GPIPE_FAST_TEST_SCALE"


class UserObject:
    """A user-defined object with an attribute that no forward reads."""

    shared = 1.0

    def __init__(self) -> None:
        self.scale, self.unread = 1.0, 0

    @property
    def doubled(self) -> float:
        return self.scale * 2


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


@dataclasses.dataclass
class Data:
    scale: float = 1.0
    many: list[float] = dataclasses.field(default_factory=lambda: [1.0])


class ComputedAttribute:
    """Computes an attribute in __getattr__, as some configuration classes do."""

    def __init__(self) -> None:
        self.kept = 1.0

    def __getattr__(self, name: str) -> float:
        if name != "scale":
            raise AttributeError(name)
        return self.kept


class CountingSchedule:
    """A schedule with a side effect: it counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def step(self) -> float:
        self.calls += 1
        return 1.0 + self.calls / 8


class ReadsState(nn.Module):
    """Scales the output of a linear layer by a number that it reads from Python state."""

    shared = 1.0

    def __init__(self, read: Callable[[ReadsState], float], held: Any = None) -> None:
        super().__init__()
        self.linear, self.read, self.held = nn.Linear(4, 4), read, held

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.read(self))


class ReadsStateIndirectly(ReadsState):
    """Reads the number through a property and a function."""

    @property
    def scale(self) -> float:
        return read_through_function(self)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.scale)


def read_through_function(layer: ReadsState) -> float:
    return layer.read(layer)


def make_closure() -> tuple[Callable[[ReadsState], float], Callable[[float], None]]:
    scale = 1.0

    def read(layer: ReadsState) -> float:
        return scale

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return read, change


def count_in_global(layer: ReadsState) -> float:
    global COUNTER
    COUNTER += 1
    return 1.0 + COUNTER / 8


def append_to_global_list(layer: ReadsState) -> float:
    LOG.append(1)
    return 1.0 + len(LOG) / 8


def import_in_forward(layer: ReadsState) -> float:
    import settings_of_a_test  # type: ignore[import-not-found]

    found: float = settings_of_a_test.scale
    return found


def read_default_argument(layer: ReadsState, many: dict[str, float] = {"scale": 1.0}) -> float:  # noqa: B006
    return many["scale"]


def count_in_function_attribute(layer: ReadsState) -> float:
    count_in_function_attribute.calls = getattr(count_in_function_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    return 1.0 + count_in_function_attribute.calls / 8  # type: ignore[attr-defined]


def _set_global(value: float) -> None:
    global SCALE
    SCALE = value


def _patch_forward(value: float) -> None:
    def forward(self: ForwardIsPatched, x: Tensor) -> Tensor:
        return self.linear(x) * value

    ForwardIsPatched.forward = forward  # type: ignore[method-assign]


class ForwardIsPatched(ReadsState):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


@dataclasses.dataclass
class StateCase:
    """One kind of state.

    Attributes:
        read: returns the number that the forward uses.
        change: changes the state between calls.
        held: an object that the layer holds.
        layer_class: the class of the layer, if it must be a particular one.
    """

    read: Callable[[ReadsState], float]
    change: Callable[[float], object] = lambda value: None
    held: Any = None
    layer_class: type[ReadsState] | None = None


def attribute_case(held: Any, name: str = "scale") -> StateCase:
    return StateCase(lambda layer: getattr(layer.held, name), lambda v: setattr(held, name, v), held)


def _guarded_cases() -> dict[str, StateCase]:
    plain, closure_functions, numbers, raw_array = (
        UserObject(),
        make_closure(),
        np.ones(3),
        array.array("d", [1.0]),
    )
    partial: dict[str, float] = {"scale": 1.0}
    return {
        "global variable": StateCase(lambda layer: SCALE, _set_global),
        "nested container": StateCase(
            lambda layer: NESTED["scale"][0], lambda v: NESTED["scale"].__setitem__(0, v)
        ),
        "attribute of a module": StateCase(lambda layer: CONFIG.scale, lambda v: setattr(CONFIG, "scale", v)),
        "import in forward": StateCase(import_in_forward, lambda v: setattr(CONFIG, "scale", v)),
        "object": StateCase(lambda layer: layer.held.scale, lambda v: setattr(plain, "scale", v), plain),
        "property of an object": StateCase(
            lambda layer: layer.held.doubled, lambda v: setattr(plain, "scale", v), plain
        ),
        "class of an object": StateCase(
            lambda layer: layer.held.shared, lambda v: setattr(UserObject, "shared", v), plain
        ),
        "class of the layer": StateCase(
            lambda layer: layer.shared, lambda v: setattr(ReadsState, "shared", v)
        ),
        "slots": attribute_case(Slotted()),
        "dataclass": attribute_case(Data()),
        "namespace": attribute_case(types.SimpleNamespace(scale=1.0)),
        "arguments": attribute_case(argparse.Namespace(scale=1.0)),
        "computed attribute": StateCase(
            lambda layer: layer.held.scale, lambda v: setattr(ALIASED, "kept", v), ALIASED
        ),
        "closure": StateCase(closure_functions[0], closure_functions[1]),
        "default argument": StateCase(
            read_default_argument,
            lambda v: read_default_argument.__defaults__[0].update(scale=v),  # type: ignore[index]
        ),
        "partial": StateCase(
            functools.partial(lambda layer, held: held["scale"], held=partial),
            lambda v: partial.update(scale=v),
        ),
        "environment": StateCase(
            lambda layer: float(os.environ.get(VARIABLE, "1")),
            lambda v: os.environ.update({VARIABLE: str(v)}),
        ),
        "getenv": StateCase(
            lambda layer: float(os.getenv(VARIABLE) or 1), lambda v: os.environ.update({VARIABLE: str(v)})
        ),
        "NumPy array": StateCase(lambda layer: float(numbers[1]), lambda v: numbers.__setitem__(1, v)),
        "array": StateCase(lambda layer: raw_array[0], lambda v: raw_array.__setitem__(0, v)),
        "deque": StateCase(lambda layer: QUEUE[-1], lambda v: QUEUE.append(v)),
        "forward of the class": StateCase(lambda layer: 1.0, _patch_forward, layer_class=ForwardIsPatched),
        "function of a library": StateCase(lambda layer: math.fsum([1.0, SCALE]), _set_global),
    }


ALIASED = ComputedAttribute()
GUARDED = _guarded_cases()

# State that cannot be guarded, with the reason that the warning gives.
UNGUARDABLE: dict[str, tuple[Callable[[], StateCase], str]] = {
    "random": (lambda: StateCase(lambda layer: 1 + random.random()), "draws from Python's random numbers"),
    "gauss": (lambda: StateCase(lambda layer: random.gauss(1, 0.1)), "draws from Python's random numbers"),
    "generator": (
        lambda: StateCase(lambda layer: 1 + GENERATOR.random()),
        "draws from Python's random numbers",
    ),
    "NumPy": (lambda: StateCase(lambda layer: 1 + np.random.rand()), "draws from the NumPy generator"),
    "NumPy generator": (
        lambda: StateCase(lambda layer: 1 + NUMPY.random()),
        "draws from the NumPy generator",
    ),
    "clock": (lambda: StateCase(lambda layer: 1.0 + 0 * time.time()), "reads the clock"),
    "date": (lambda: StateCase(lambda layer: 1.0 + 0 * datetime.datetime.now().year), "reads the clock"),
    "counter": (lambda: StateCase(count_in_global), "changes the global variable COUNTER"),
    "list": (lambda: StateCase(append_to_global_list), "changes the global variable LOG"),
    "function's attribute": (
        lambda: StateCase(count_in_function_attribute),
        "changes the function count_in_function_attribute",
    ),
    "schedule": (lambda: StateCase(lambda layer: layer.held.step(), held=CountingSchedule()), "sets held"),
    "iterator": (
        lambda: StateCase(lambda layer: 1.0 + next(layer.held) / 8, held=itertools.count()),
        "held (itertools.count), whose state cannot be compared",
    ),
    "print": (lambda: StateCase(lambda layer: print(end="") or 1.0), "it prints"),
}


def _seed_generators() -> None:
    global COUNTER
    random.seed(1)
    np.random.seed(1)
    GENERATOR.seed(1)
    NUMPY.bit_generator.state = np.random.default_rng(1).bit_generator.state
    COUNTER = 0
    LOG.clear()
    vars(count_in_function_attribute).clear()


def _reset_state(layer: ReadsState) -> None:
    """Resets counters and generators, so that the pipeline and the loop start from the same state."""
    _seed_generators()
    if isinstance(layer.held, CountingSchedule):
        layer.held.calls = 0
    if isinstance(layer.held, itertools.count):
        layer.held = itertools.count()


def _step(run: Callable[[Tensor], Tensor], model: nn.Module, layer: ReadsState, x: Tensor) -> list[Tensor]:
    _reset_state(layer)
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
