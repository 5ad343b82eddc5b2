"""Layers that read Python state beside their module: no value is frozen when they are traced.

Every kind of state is read by forward itself, or by a property that calls a function; between calls it is
changed. What a guard can compare stays native and is traced again for the new value; what cannot be guarded
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


class Plain:
    """An object of the user's, with an attribute that no forward reads."""

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


class Aliased:
    """Answers for a name that it does not keep, as some configurations do."""

    def __init__(self) -> None:
        self.kept = 1.0

    def __getattr__(self, name: str) -> float:
        if name != "scale":
            raise AttributeError(name)
        return self.kept


class Stepping:
    """A schedule that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def step(self) -> float:
        self.calls += 1
        return 1.0 + self.calls / 8


class Reading(nn.Module):
    """Scales what its linear layer returns by a number that it reads."""

    shared = 1.0

    def __init__(self, read: Callable[[Reading], float], held: Any = None) -> None:
        super().__init__()
        self.linear, self.read, self.held = nn.Linear(4, 4), read, held

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.read(self))


class Indirect(Reading):
    """Reads through a helper and a property."""

    @property
    def scale(self) -> float:
        return helper(self)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.scale)


def helper(layer: Reading) -> float:
    return layer.read(layer)


def closure() -> tuple[Callable[[Reading], float], Callable[[float], None]]:
    scale = 1.0

    def read(layer: Reading) -> float:
        return scale

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return read, change


def counting(layer: Reading) -> float:
    global COUNTER
    COUNTER += 1
    return 1.0 + COUNTER / 8


def logging(layer: Reading) -> float:
    LOG.append(1)
    return 1.0 + len(LOG) / 8


def importing(layer: Reading) -> float:
    import settings_of_a_test  # type: ignore[import-not-found]

    found: float = settings_of_a_test.scale
    return found


def default(layer: Reading, many: dict[str, float] = {"scale": 1.0}) -> float:  # noqa: B006
    return many["scale"]


def noting(layer: Reading) -> float:
    noting.calls = getattr(noting, "calls", 0) + 1  # type: ignore[attr-defined]
    return 1.0 + noting.calls / 8  # type: ignore[attr-defined]


def _set_global(value: float) -> None:
    global SCALE
    SCALE = value


def _patch(value: float) -> None:
    def forward(self: Patched, x: Tensor) -> Tensor:
        return self.linear(x) * value

    Patched.forward = forward  # type: ignore[method-assign]


class Patched(Reading):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


@dataclasses.dataclass
class State:
    """One kind of state.

    Attributes:
        read: what forward reads.
        change: changes it between calls.
        held: what the layer holds.
        kind: class of the layer.
    """

    read: Callable[[Reading], float]
    change: Callable[[float], object] = lambda value: None
    held: Any = None
    kind: type[Reading] | None = None


def object_state(held: Any, name: str = "scale") -> State:
    return State(lambda layer: getattr(layer.held, name), lambda v: setattr(held, name, v), held)


def _guarded() -> dict[str, State]:
    plain, cell, numbers, raw = Plain(), closure(), np.ones(3), array.array("d", [1.0])
    partial: dict[str, float] = {"scale": 1.0}
    return {
        "global variable": State(lambda layer: SCALE, _set_global),
        "nested container": State(
            lambda layer: NESTED["scale"][0], lambda v: NESTED["scale"].__setitem__(0, v)
        ),
        "attribute of a module": State(lambda layer: CONFIG.scale, lambda v: setattr(CONFIG, "scale", v)),
        "import in forward": State(importing, lambda v: setattr(CONFIG, "scale", v)),
        "object": State(lambda layer: layer.held.scale, lambda v: setattr(plain, "scale", v), plain),
        "property of an object": State(
            lambda layer: layer.held.doubled, lambda v: setattr(plain, "scale", v), plain
        ),
        "class of an object": State(
            lambda layer: layer.held.shared, lambda v: setattr(Plain, "shared", v), plain
        ),
        "class of the layer": State(lambda layer: layer.shared, lambda v: setattr(Reading, "shared", v)),
        "slots": object_state(Slotted()),
        "dataclass": object_state(Data()),
        "namespace": object_state(types.SimpleNamespace(scale=1.0)),
        "arguments": object_state(argparse.Namespace(scale=1.0)),
        "computed attribute": State(
            lambda layer: layer.held.scale, lambda v: setattr(ALIASED, "kept", v), ALIASED
        ),
        "closure": State(cell[0], cell[1]),
        "default argument": State(default, lambda v: default.__defaults__[0].update(scale=v)),  # type: ignore[index]
        "partial": State(
            functools.partial(lambda layer, held: held["scale"], held=partial),
            lambda v: partial.update(scale=v),
        ),
        "environment": State(
            lambda layer: float(os.environ.get(VARIABLE, "1")),
            lambda v: os.environ.update({VARIABLE: str(v)}),
        ),
        "getenv": State(
            lambda layer: float(os.getenv(VARIABLE) or 1), lambda v: os.environ.update({VARIABLE: str(v)})
        ),
        "NumPy array": State(lambda layer: float(numbers[1]), lambda v: numbers.__setitem__(1, v)),
        "array": State(lambda layer: raw[0], lambda v: raw.__setitem__(0, v)),
        "deque": State(lambda layer: QUEUE[-1], lambda v: QUEUE.append(v)),
        "forward of the class": State(lambda layer: 1.0, _patch, kind=Patched),
        "function of a library": State(lambda layer: math.fsum([1.0, SCALE]), _set_global),
    }


ALIASED = Aliased()
GUARDED = _guarded()

# What cannot be guarded, with the reason that the warning gives.
IN_PYTHON: dict[str, tuple[Callable[[], State], str]] = {
    "random": (lambda: State(lambda layer: 1 + random.random()), "draws from Python's random numbers"),
    "gauss": (lambda: State(lambda layer: random.gauss(1, 0.1)), "draws from Python's random numbers"),
    "generator": (lambda: State(lambda layer: 1 + GENERATOR.random()), "draws from Python's random numbers"),
    "NumPy": (lambda: State(lambda layer: 1 + np.random.rand()), "draws from the NumPy generator"),
    "NumPy generator": (lambda: State(lambda layer: 1 + NUMPY.random()), "draws from the NumPy generator"),
    "clock": (lambda: State(lambda layer: 1.0 + 0 * time.time()), "reads the clock"),
    "date": (lambda: State(lambda layer: 1.0 + 0 * datetime.datetime.now().year), "reads the clock"),
    "counter": (lambda: State(counting), "changes the global variable COUNTER"),
    "list": (lambda: State(logging), "changes the global variable LOG"),
    "function's attribute": (lambda: State(noting), "changes the function noting"),
    "schedule": (lambda: State(lambda layer: layer.held.step(), held=Stepping()), "sets held"),
    "iterator": (
        lambda: State(lambda layer: 1.0 + next(layer.held) / 8, held=itertools.count()),
        "held (itertools.count), whose state cannot be compared",
    ),
    "print": (lambda: State(lambda layer: print(end="") or 1.0), "it prints"),
}


def _seed() -> None:
    global COUNTER
    random.seed(1)
    np.random.seed(1)
    GENERATOR.seed(1)
    NUMPY.bit_generator.state = np.random.default_rng(1).bit_generator.state
    COUNTER = 0
    LOG.clear()
    vars(noting).clear()


def _reset(layer: Reading) -> None:
    """State that counts begins anew, so that both sides count from 0."""
    _seed()
    if isinstance(layer.held, Stepping):
        layer.held.calls = 0
    if isinstance(layer.held, itertools.count):
        layer.held = itertools.count()


def _step(run: Callable[[Tensor], Tensor], model: nn.Module, layer: Reading, x: Tensor) -> list[Tensor]:
    _reset(layer)
    model.zero_grad()
    output = run(x)
    output.square().sum().backward()
    return [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def _compare(state: State, kind: type[Reading], checkpoint: str, values: list[float]) -> list[str]:
    """Trains by both, changing the state between steps; returns the warnings."""
    torch.manual_seed(0)
    layer = (state.kind or kind)(state.read, state.held)
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


def _sampled(names: list[str], number: int) -> list[tuple[str, str, str]]:
    """For each kind of state one way to read it and one checkpoint mode, others with every commit."""
    draw = random.Random(seed())
    ways, modes = ["directly", "indirectly"], ["always", "except_last", "never"]
    return [
        (name, *rest) for name in names for rest in draw.sample(list(itertools.product(ways, modes)), number)
    ]


@pytest.fixture(autouse=True)
def settings_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, CONFIG.__name__, CONFIG)
    monkeypatch.setenv(VARIABLE, "1")


@pytest.mark.parametrize(("name", "way", "checkpoint"), _sampled(list(GUARDED), 1))
def test_state_that_is_guarded(name: str, way: str, checkpoint: str) -> None:
    kind = Indirect if way == "indirectly" else Reading
    assert _compare(GUARDED[name], kind, checkpoint, [1.0, 1.0, 2.0, 0.5, 2.0]) == []


@pytest.mark.parametrize(("name", "way", "checkpoint"), _sampled(list(IN_PYTHON), 1))
def test_state_that_cannot_be_guarded(name: str, way: str, checkpoint: str) -> None:
    make, reason = IN_PYTHON[name]
    kind = Indirect if way == "indirectly" else Reading
    (warning,) = _compare(make(), kind, checkpoint, [1.0] * 3)
    assert "layer 1" in warning
    assert reason in warning


@pytest.mark.soak
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("kind", [Reading, Indirect])
def test_all_state_in_every_mode(kind: type[Reading], checkpoint: str) -> None:
    for name, state in GUARDED.items():
        assert _compare(state, kind, checkpoint, [1.0, 1.0, 2.0, 0.5, 2.0, 1.0]) == [], name
    for name, (make, reason) in IN_PYTHON.items():
        assert reason in _compare(make(), kind, checkpoint, [1.0] * 4)[0], name


class Filling(nn.Module):
    """Makes a tensor of the default dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.full((4,), 1 / 3)


def test_the_default_dtype_counts() -> None:
    seq = nn.Sequential(nn.Linear(4, 4), Filling())
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
