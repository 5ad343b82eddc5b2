"""Kinds of Python state that a layer's forward may read outside its module, and changes of that state."""

from __future__ import annotations

import argparse
import array
import collections
import configparser
import ctypes
import dataclasses
import datetime
import decimal
import functools
import itertools
import math
import os
import queue
import random
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
    plain, closure_functions = UserObject(), make_closure()
    partial: dict[str, float] = {"scale": 1.0}
    chain, config = collections.ChainMap({"scale": 1.0}, {"unread": 0.0}), configparser.ConfigParser()
    config.read_dict({"a": {"scale": "1.0"}})
    alive: weakref.WeakSet[UserObject] = weakref.WeakSet()
    number, event, context = ctypes.c_double(1.0), threading.Event(), decimal.Context()
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
        "deque": StateCase(lambda layer: QUEUE[-1], lambda v: QUEUE.append(v)),
        "forward of the class": StateCase(lambda layer: 1.0, _patch_forward, layer_class=ForwardIsPatched),
        "module that the layer holds": StateCase(
            lambda layer: layer.held.scale, lambda v: setattr(CONFIG, "scale", v), CONFIG
        ),
        "chain of dicts": StateCase(
            lambda layer: layer.held["scale"], lambda v: chain.__setitem__("scale", v), chain
        ),
        "configuration file": StateCase(
            lambda layer: float(layer.held["a"]["scale"]), lambda v: config.set("a", "scale", str(v)), config
        ),
        "section of a configuration file": StateCase(
            lambda layer: layer.held.getfloat("scale"),
            lambda v: config.set("a", "scale", str(v)),
            config["a"],
        ),
        "view of a dict": StateCase(
            lambda layer: layer.held["scale"],
            lambda v: partial.update(scale=v),
            types.MappingProxyType(partial),
        ),
        "set that other code fills": StateCase(
            lambda layer: 1.0 + len(layer.held), lambda v: alive.add(OBJECTS[v]), alive
        ),
        "function of a library": StateCase(lambda layer: math.fsum([1.0, SCALE]), _set_global),
        "event": StateCase(
            lambda layer: 1.0 + layer.held.is_set(), lambda v: event.clear() if v == 1 else event.set(), event
        ),
        "ctypes": StateCase(lambda layer: layer.held.value, lambda v: setattr(number, "value", v), number),
        "weak reference": StateCase(
            lambda layer: layer.held().scale, lambda v: setattr(plain, "scale", v), weakref.ref(plain)
        ),
        "decimal context": StateCase(
            lambda layer: layer.held.prec / 8, lambda v: setattr(context, "prec", int(8 * v)), context
        ),
    }


ALIASED = ComputedAttribute()
OBJECTS = {value: UserObject() for value in (0.5, 1.0, 2.0)}
GUARDED = _guarded_cases()

NUMBERS, RAW_ARRAY = np.ones(3), array.array("d", [1.0])

# State that the tracer cannot read or guard, or that forward changes.
UNGUARDABLE: dict[str, Callable[[], StateCase]] = {
    "NumPy array": lambda: StateCase(lambda layer: float(NUMBERS[1]), lambda v: NUMBERS.__setitem__(1, v)),
    "array": lambda: StateCase(lambda layer: RAW_ARRAY[0], lambda v: RAW_ARRAY.__setitem__(0, v)),
    "random": lambda: StateCase(lambda layer: 1 + random.random()),
    "gauss": lambda: StateCase(lambda layer: random.gauss(1, 0.1)),
    "generator": lambda: StateCase(lambda layer: 1 + GENERATOR.random()),
    "NumPy": lambda: StateCase(lambda layer: 1 + np.random.rand()),
    "NumPy generator": lambda: StateCase(lambda layer: 1 + NUMPY.random()),
    "clock": lambda: StateCase(lambda layer: 1.0 + 0 * time.time()),
    "date": lambda: StateCase(lambda layer: 1.0 + 0 * datetime.datetime.now().year),
    "counter": lambda: StateCase(count_in_global),
    "list": lambda: StateCase(append_to_global_list),
    "function's attribute": lambda: StateCase(count_in_function_attribute),
    "schedule": lambda: StateCase(lambda layer: layer.held.step(), held=CountingSchedule()),
    "iterator": lambda: StateCase(lambda layer: 1.0 + next(layer.held) / 8, held=itertools.count()),
    "queue": lambda: StateCase(lambda layer: layer.held.get(timeout=60), held=queue.Queue()),
    "view of memory": lambda: StateCase(
        lambda layer: layer.held[0], held=memoryview(array.array("d", [1.0]))
    ),
    "list of a tensor": lambda: StateCase(lambda layer: layer.held.tolist()[0], held=torch.ones(2)),
    "array of a tensor": lambda: StateCase(lambda layer: float(layer.held.numpy()[0]), held=torch.ones(2)),
    "array that NumPy makes of a tensor": lambda: StateCase(
        lambda layer: float(np.asarray(layer.held)[0]), held=torch.ones(2)
    ),
    "print": lambda: StateCase(lambda layer: print(end="") or 1.0),
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


def reset_state(layer: ReadsState) -> None:
    """Resets counters and generators, so that the pipeline and the loop start from the same state."""
    _seed_generators()
    if isinstance(layer.held, CountingSchedule):
        layer.held.calls = 0
    if isinstance(layer.held, queue.Queue):
        layer.held.queue.clear()
        for microbatch in range(3):
            layer.held.put(1.0 + microbatch / 8)
    if isinstance(layer.held, itertools.count):
        layer.held = itertools.count()
