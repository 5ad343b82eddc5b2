"""Layers that read Python state, which changes between calls, in the ways that Python's data model allows.

Every kind must equal the plain loop, before and after the change, whether or not the layer is native. A layer
whose state can be guarded is traced again for the new value and stays native, any other one runs in Python
after one warning (contract 5).
"""

from __future__ import annotations

import argparse
import array
import collections
import configparser
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import itertools
import logging
import math
import operator
import os
import pathlib
import queue
import random
import re
import sys
import threading
import time
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.reference import plain_loop

pytestmark = pytest.mark.usefixtures("one_thread")

STATE: dict[str, Any] = {}
SCALE = 2.0
TENSOR = torch.ones(6)
NUMBERS: set[float] = set()


def read_scale(x: Tensor) -> Tensor:
    return x * SCALE


def backward_scale(gradient: Tensor) -> Tensor:
    return gradient * SCALE


@functools.lru_cache
def cached(key: str) -> float:
    value: float = STATE[key]
    return value


class ScaledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return backward_scale(gradient)


class Config:
    __match_args__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class OtherConfig(Config):
    pass


class Color(enum.Enum):
    RED = 1


class Computed:
    @property
    def scale(self) -> float:
        return SCALE

    def __getattr__(self, name: str) -> float:
        value: float = STATE["scale"]
        return value


class Descriptor:
    def __get__(self, instance: object, owner: type) -> float:
        value: float = STATE["scale"]
        return value


COMPUTED = Computed()
SETTINGS = types.ModuleType("settings_of_changed_python_state")


class Sentinel:
    """Has nothing but its identity."""


AUTO, OTHER = Sentinel(), Sentinel()
SCALES = {AUTO: 2.0, OTHER: 5.0}
ORDER = OrderedDict(first=2.0, second=5.0)


class Base:
    gain = 2.0


class OtherBase:
    gain = 5.0


class Derived(Base):
    pass


class Held(nn.Module):
    """A module that is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = 2.0


class Layer(nn.Module):
    computed = Descriptor()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.plain = torch.full((6,), 2.0)
        self.config = Config(2.0)
        self.number = 2.0
        self.nested = {"list": [1.0, {"value": 2.0}]}
        self.table = {"module": Held(), "tensor": torch.arange(36.0).view(6, 6)}
        self.mode, self.zero, self.pair = AUTO, 0.0, (1,)
        self.calls, self.held = 0, None


def branch_on_elements(layer: Layer, x: Tensor) -> Tensor:
    try:
        scale = float(x.max())
    except Exception:
        scale = 7.0
    return x * scale


def catch_a_lookup(layer: Any, x: Tensor) -> Tensor:
    try:
        return x * layer.late
    except AttributeError:
        return x * 2


def catch_a_key(layer: Any, x: Tensor) -> Tensor:
    try:
        return x * STATE["late"]
    except KeyError:
        return x * 2


def hook_in_forward(layer: Layer, x: Tensor) -> Tensor:
    y = x * layer.weight
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * SCALE)
    return y


def match_config(layer: Layer, x: Tensor) -> Tensor:
    match layer.config:
        case Config(scale=scale):
            return x * scale
    return x


def import_in_forward(layer: Layer, x: Tensor) -> Tensor:
    from settings_of_changed_python_state import value  # type: ignore[import-not-found]

    return x * value


def count_calls(layer: Layer, x: Tensor) -> Tensor:
    layer.calls += 1
    return x * layer.calls


def replace_plain_tensor(layer: Layer, x: Tensor) -> Tensor:
    layer.plain = layer.plain + 1
    return x * layer.plain


def change_plain_tensor(layer: Layer, x: Tensor) -> Tensor:
    layer.plain.add_(1)
    return x * layer.plain.clone()


SCALE_FORMAT = "{.scale}"


def format_scale(config: Config) -> str:
    return SCALE_FORMAT.format(config)


def with_default(layer: Layer, x: Tensor, scale: float = 2.0) -> Tensor:
    return x * scale


def set_global(name: str, value: object) -> None:
    globals()[name] = value


def nothing(layer: Layer) -> None:
    pass


Forward = Callable[..., Tensor]
KINDS: dict[str, tuple[Forward, Callable[[Layer], object]]] = {
    "exception at elements": (branch_on_elements, nothing),
    "attribute of a parameter": (
        lambda layer, x: x * getattr(layer.weight, "scale", 1.0),
        lambda layer: setattr(layer.weight, "scale", 5.0),
    ),
    "class of a parameter": (
        lambda layer, x: x * (2.0 if isinstance(layer.weight, nn.Parameter) else 3.0),
        lambda layer: (layer._parameters.pop("weight"), setattr(layer, "weight", torch.ones(6))),
    ),
    "data of a tensor": (
        lambda layer, x: x * layer.plain,
        lambda layer: setattr(layer.plain, "data", torch.full((6,), 9.0)),
    ),
    "data of a parameter": (
        lambda layer, x: x,
        lambda layer: setattr(layer.weight, "data", torch.full((6,), 9.0)),
    ),
    "a pattern": (match_config, lambda layer: setattr(layer.config, "scale", 3.0)),
    "attrgetter": (
        lambda layer, x: x * operator.attrgetter("config.scale")(layer),
        lambda layer: setattr(layer.config, "scale", 3.0),
    ),
    "partial of getattr": (
        lambda layer, x: x * functools.partial(getattr, layer.config)("scale"),
        lambda layer: setattr(layer.config, "scale", 3.0),
    ),
    "str.format": (
        lambda layer, x: x * float(format_scale(layer.config)),
        lambda layer: setattr(layer.config, "scale", 3.0),
    ),
    "another configuration": (
        lambda layer, x: x * (2.0 if type(layer.config) is Config else 5.0),
        lambda layer: setattr(layer.config, "__class__", OtherConfig),
    ),
    "identity": (
        lambda layer, x: x * (id(layer.config) % 1000),
        lambda layer: setattr(layer, "config", Config(2.0)),
    ),
    "import in forward": (import_in_forward, lambda layer: setattr(SETTINGS, "value", 5.0)),
    "sys.modules": (
        lambda layer, x: x * sys.modules[SETTINGS.__name__].value,
        lambda layer: setattr(SETTINGS, "value", 5.0),
    ),
    "hook in forward": (hook_in_forward, lambda layer: set_global("SCALE", 9.0)),
    "helper of a backward": (
        lambda layer, x: ScaledBackward.apply(x),
        lambda layer: set_global("SCALE", 9.0),
    ),
    "another helper of a backward": (
        lambda layer, x: ScaledBackward.apply(x),
        lambda layer: set_global("backward_scale", lambda gradient: gradient * 7),
    ),
    "cached function": (
        lambda layer, x: x * cached("scale"),
        lambda layer: (STATE.update(scale=8.0), cached.cache_clear()),
    ),
    "globals()": (lambda layer, x: x * globals()["SCALE"], lambda layer: set_global("SCALE", 4.0)),
    "code of a function": (
        lambda layer, x: read_scale(x),
        lambda layer: setattr(read_scale, "__code__", (lambda x: x * 5).__code__),
    ),
    "attribute of an enum": (
        lambda layer, x: x * Color.RED.weight,  # type: ignore[attr-defined]
        lambda layer: setattr(Color.RED, "weight", 6.0),
    ),
    "nested containers": (
        lambda layer, x: x * layer.nested["list"][1]["value"],
        lambda layer: layer.nested["list"][1].update(value=5.0),
    ),
    "length of a list": (
        lambda layer, x: x * len(layer.nested["list"]),
        lambda layer: layer.nested["list"].append(3.0),
    ),
    "sum of a set": (lambda layer, x: x * sum(NUMBERS), lambda layer: NUMBERS.add(5.0)),
    "os.environ": (
        lambda layer, x: x * float(os.environ.get("GPIPE_FAST_TEST_SCALE", "2")),
        lambda layer: os.environ.update(GPIPE_FAST_TEST_SCALE="4"),
    ),
    "os.getenv": (
        lambda layer, x: x * float(os.getenv("GPIPE_FAST_TEST_SCALE", "2")),
        lambda layer: os.environ.update(GPIPE_FAST_TEST_SCALE="4"),
    ),
    "forward of the class": (
        lambda layer, x: x,
        lambda layer: setattr(type(layer), "forward", lambda layer, x: x * layer.weight * 11),
    ),
    "forward of the object": (
        lambda layer, x: x,
        lambda layer: setattr(layer, "forward", lambda x: x * layer.weight * 8),
    ),
    "default argument": (
        with_default,
        lambda layer: setattr(type(layer).own, "__defaults__", (9.0,)),  # type: ignore[attr-defined]
    ),
    "array of 0 dimensions": (
        lambda layer, x: x * float(getattr(layer, "array", 2.0)),
        lambda layer: setattr(layer, "array", np.array(3.0)),
    ),
    "vars": (lambda layer, x: x * vars(layer)["number"], lambda layer: setattr(layer, "number", 6.0)),
    "hasattr": (
        lambda layer, x: x * (5.0 if hasattr(layer, "late") else 2.0),
        lambda layer: setattr(layer, "late", 1),
    ),
    "attribute of the class": (
        lambda layer, x: x * getattr(type(layer), "gain", 2.0),
        lambda layer: setattr(type(layer), "gain", 5.0),
    ),
    "requires_grad": (
        lambda layer, x: x * (2.0 if layer.weight.requires_grad else 3.0),
        lambda layer: layer.weight.requires_grad_(False),
    ),
    "number of parameters": (
        lambda layer, x: x * len(list(layer.parameters())),
        lambda layer: layer.register_parameter("other", nn.Parameter(torch.ones(6))),
    ),
    "training": (lambda layer, x: x * (1.0 if layer.training else 2.0), lambda layer: layer.eval()),
    "property": (lambda layer, x: x * COMPUTED.scale, lambda layer: set_global("SCALE", 11.0)),
    "__getattr__": (lambda layer, x: x * COMPUTED.anything, lambda layer: STATE.update(scale=6.0)),
    "descriptor": (lambda layer, x: x * layer.computed, lambda layer: STATE.update(scale=6.0)),
    "another global tensor": (
        lambda layer, x: x * TENSOR,
        lambda layer: set_global("TENSOR", torch.full((6,), 5.0)),
    ),
    "elements of a global tensor": (lambda layer, x: x * TENSOR, lambda layer: TENSOR.fill_(3.0)),
    "identity of an object": (
        lambda layer, x: x * (2.0 if layer.mode is AUTO else 5.0),
        lambda layer: setattr(layer, "mode", OTHER),
    ),
    "key by identity": (
        lambda layer, x: x * SCALES[layer.mode],
        lambda layer: setattr(layer, "mode", OTHER),
    ),
    "minus zero": (
        lambda layer, x: x * math.copysign(2.0, layer.zero),
        lambda layer: setattr(layer, "zero", -0.0),
    ),
    "type in a tuple": (
        lambda layer, x: x * (2.0 if isinstance(layer.pair[0], float) else 3.0),
        lambda layer: setattr(layer, "pair", (1.0,)),
    ),
    "order of a dictionary": (
        lambda layer, x: x * next(iter(ORDER.values())),
        lambda layer: ORDER.move_to_end("first"),
    ),
    "absent attribute": (catch_a_lookup, lambda layer: setattr(layer, "late", 5.0)),
    "absent key": (catch_a_key, lambda layer: STATE.update(late=5.0)),
    "module in a dictionary": (
        lambda layer, x: x * layer.table["module"].gain,
        lambda layer: setattr(layer.table["module"], "gain", 5.0),
    ),
    "tensor in a dictionary": (
        lambda layer, x: x @ layer.table["tensor"],
        lambda layer: layer.table["tensor"].t_(),
    ),
    "bases of a class": (
        lambda layer, x: x * Derived.gain,
        lambda layer: setattr(Derived, "__bases__", (OtherBase,)),
    ),
    "patched torch.relu": (
        lambda layer, x: nn.functional.relu(x),
        lambda layer: setattr(torch, "relu", torch.neg),
    ),
    "shadowed built-in": (
        lambda layer, x: x * sum([1.0, 2.0]),
        lambda layer: set_global("sum", lambda values: 9.0),
    ),
    "counted calls": (count_calls, nothing),
    "replaced tensor": (replace_plain_tensor, nothing),
    "tensor changed in place": (change_plain_tensor, nothing),
}


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


@dataclasses.dataclass
class Data:
    scale: float = 1.0


class HasCachedProperty:
    @functools.cached_property
    def scale(self) -> float:
        return 1.5


class Pair(NamedTuple):
    scale: float
    other: float


class Level(enum.Enum):
    HIGH = 1.5


class CountingSchedule:
    """A schedule with a side effect: it counts its calls."""

    calls = 0

    def step(self) -> float:
        self.calls += 1
        return 1.0 + self.calls / 8


@functools.singledispatch
def half_of(value: float) -> float:
    return value / 2


@functools.lru_cache
def cached_half(value: float) -> float:
    return value / 2


class Read(NamedTuple):
    """How a layer reads a number from what it holds.

    Attributes:
        read: returns the number.
        held: makes what the layer holds.
        change: changes it to another number.
        warns: whether the layer runs in Python after a warning; None if that depends on PyTorch.
    """

    read: Callable[[Any], float]
    held: Callable[[], Any] = lambda: None
    change: Callable[[Any], object] = lambda held: None
    warns: bool | None = False


def attribute(make: Callable[[], Any], name: str = "scale") -> Read:
    return Read(lambda held: getattr(held, name), make, lambda held: setattr(held, name, 2.0))


def config_file() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read_dict({"a": {"scale": "1.0"}})
    return found


def closure() -> dict[str, Callable[..., Any]]:
    scale = 1.0

    def read() -> float:
        return scale

    def change() -> None:
        nonlocal scale
        scale = 2.0

    return {"read": read, "change": change}


GENERATOR, NUMPY, COUNTER, LOG = random.Random(0), np.random.default_rng(0), 0, list[int]()
ALIVE, PLAIN = Config(1.0), Config(1.0)


def read_under_lock(lock: Any) -> float:
    with lock:
        return 1.5


def count_in_global() -> float:
    global COUNTER
    COUNTER += 1
    return 1.0 + COUNTER / 8


def append_to_global_list() -> float:
    LOG.append(1)
    return 1.0 + len(LOG) / 8


def count_in_function_attribute() -> float:
    count_in_function_attribute.calls = getattr(count_in_function_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    return 1.0 + count_in_function_attribute.calls / 8  # type: ignore[attr-defined]


def numbers_to_get() -> queue.Queue[float]:
    return queue.Queue()


# Guards see changes of these; reads that catch errors of lookups are not guarded.
READS = {
    "slots": attribute(Slotted),
    "dataclass": attribute(Data),
    "namespace": attribute(lambda: types.SimpleNamespace(scale=1.0)),
    "arguments": attribute(lambda: argparse.Namespace(scale=1.0)),
    "ctypes": attribute(lambda: ctypes.c_double(1.0), "value"),
    "closure": Read(lambda held: held["read"](), closure, lambda held: held["change"]()),
    "partial": Read(
        lambda held: held[0](),
        lambda: [functools.partial(lambda held: held["scale"], held=(own := {"scale": 1.0})), own],
        lambda held: held[1].update(scale=2.0),
    ),
    "deque": Read(
        lambda held: held[-1], lambda: collections.deque([1.0], maxlen=3), lambda held: held.append(2.0)
    ),
    "chain of dicts": Read(
        lambda held: held["scale"],
        lambda: collections.ChainMap({"scale": 1.0}, {"unread": 0.0}),
        lambda held: held.__setitem__("scale", 2.0),
    ),
    "configuration file": Read(
        lambda held: float(held["a"]["scale"]), config_file, lambda held: held.set("a", "scale", "2.0"), True
    ),
    "section of a configuration file": Read(
        lambda held: held.getfloat("scale"),
        lambda: config_file()["a"],
        lambda held: held.parser.set("a", "scale", "2.0"),
        True,
    ),
    "view of a dict": Read(
        lambda held: held[0]["scale"],
        lambda: (types.MappingProxyType(own := {"scale": 1.0}), own),
        lambda held: held[1].update(scale=2.0),
    ),
    "set that other code fills": Read(
        lambda held: 1.0 + len(held), weakref.WeakSet, lambda held: held.add(ALIVE)
    ),
    "event": Read(lambda held: 1.0 + held.is_set(), threading.Event, lambda held: held.set()),
    "weak reference": Read(
        lambda held: held().scale, lambda: weakref.ref(PLAIN), lambda held: setattr(PLAIN, "scale", 2.0)
    ),
    "decimal context": Read(
        lambda held: held.prec / 8, decimal.Context, lambda held: setattr(held, "prec", 16)
    ),
    # Objects that do not change what the layers compute. PyTorch's tracer knows no model of some.
    "lock": Read(read_under_lock, threading.Lock, warns=None),
    "reentrant lock": Read(read_under_lock, threading.RLock, warns=None),
    "logger": Read(lambda held: 1.0 + held.isEnabledFor(0), lambda: logging.getLogger("test"), warns=None),
    "pattern": Read(lambda held: float(held.match("1.5 x")[0]), lambda: re.compile(r"[\d.]+")),
    "path": Read(lambda held: len(held.parts) / 2, lambda: pathlib.PurePath("a/b/c"), warns=None),
    "fraction": Read(float, lambda: fractions.Fraction(3, 2)),
    "decimal number": Read(float, lambda: decimal.Decimal("1.5"), warns=None),
    "duration": Read(lambda held: held.total_seconds(), lambda: datetime.timedelta(seconds=1.5), warns=None),
    "attribute getter": Read(
        lambda held: held(COMPUTED), lambda: operator.attrgetter("anything"), warns=None
    ),
    "function of a table": Read(lambda held: half_of(3.0), warns=None),
    "cached function": Read(lambda held: cached_half(3.0), warns=None),
    "cached property": Read(lambda held: held.scale, HasCachedProperty, warns=None),
    "module of a library": Read(lambda held: held.sqrt(2.25), lambda: math),
    "NumPy number": Read(float, lambda: np.float32(1.5), warns=None),
    "named tuple": Read(lambda held: Pair(1.0, 2.5).scale),
    "enumeration": Read(lambda held: held.value, lambda: Level.HIGH),
    "range": Read(lambda held: held.stop / 2, lambda: range(3)),
    "size": Read(lambda held: held.numel() / 2, lambda: torch.Size([3])),
    # State that the tracer cannot read or guard, or that forward changes.
    **{
        f"NumPy array of shape {np.shape(made())}": Read(
            lambda held: float(held.sum()), made, lambda held: held.__imul__(2), None
        )
        for made in (lambda: np.array(2.0), lambda: np.array([2.0]), lambda: np.full((2, 1), 2.0))
    },
    "array": Read(
        lambda held: held[0], lambda: array.array("d", [1.0]), lambda h: h.__setitem__(0, 2.0), True
    ),
    "random": Read(lambda held: 1 + random.random(), warns=True),
    "gauss": Read(lambda held: random.gauss(1, 0.1), warns=True),
    "generator": Read(lambda held: 1 + GENERATOR.random(), warns=True),
    "NumPy": Read(lambda held: 1 + np.random.rand(), warns=True),
    "NumPy generator": Read(lambda held: 1 + NUMPY.random(), warns=True),
    "clock": Read(lambda held: 1.0 + 0 * time.time(), warns=True),
    "date": Read(lambda held: 1.0 + 0 * datetime.datetime.now().year, warns=True),
    "counter": Read(lambda held: count_in_global(), warns=True),
    "list": Read(lambda held: append_to_global_list(), warns=True),
    "function's attribute": Read(lambda held: count_in_function_attribute(), warns=True),
    "schedule": Read(lambda held: held.step(), CountingSchedule, warns=True),
    "iterator": Read(lambda held: 1.0 + next(held) / 8, itertools.count, warns=True),
    "queue": Read(lambda held: held.get(timeout=60), numbers_to_get, warns=True),
    "view of memory": Read(lambda held: held[0], lambda: memoryview(array.array("d", [1.0])), warns=True),
    "list of a tensor": Read(lambda held: held.tolist()[0], lambda: torch.ones(2), warns=True),
    "array of a tensor": Read(lambda held: float(held.numpy()[0]), lambda: torch.ones(2), warns=True),
    "array that NumPy makes of a tensor": Read(
        lambda held: float(np.asarray(held)[0]), lambda: torch.ones(2), warns=True
    ),
    "print": Read(lambda held: print(end="") or 1.0, warns=True),
}


def reset(layer: Layer) -> None:
    """Resets counters and generators, so that the pipeline and the loop start from the same state."""
    global COUNTER
    random.seed(1)
    np.random.seed(1)
    GENERATOR.seed(1)
    NUMPY.bit_generator.state = np.random.default_rng(1).bit_generator.state
    COUNTER = 0
    LOG.clear()
    vars(count_in_function_attribute).clear()
    if isinstance(layer.held, CountingSchedule):
        layer.held.calls = 0
    if isinstance(layer.held, queue.Queue):
        layer.held.queue.clear()
        for microbatch in range(2):
            layer.held.put(1.0 + microbatch / 8)
    if isinstance(layer.held, itertools.count):
        layer.held = itertools.count()


@pytest.fixture(autouse=True)
def same_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, SETTINGS.__name__, SETTINGS)
    monkeypatch.setattr(SETTINGS, "value", 2.0, raising=False)
    monkeypatch.setenv("GPIPE_FAST_TEST_SCALE", "2")
    for name in ("SCALE", "TENSOR", "NUMBERS", "backward_scale"):
        monkeypatch.setitem(globals(), name, globals()[name])
    set_global("SCALE", 2.0)
    set_global("TENSOR", torch.ones(6))
    set_global("NUMBERS", {1.0, 2.0})
    monkeypatch.setattr(read_scale, "__code__", read_scale.__code__)
    monkeypatch.setattr(Color.RED, "weight", 2.0, raising=False)
    monkeypatch.setattr(torch, "relu", torch.relu)
    STATE.clear()
    STATE.update(scale=2.0)
    cached.cache_clear()
    ORDER.move_to_end("second")
    Derived.__bases__ = (Base,)
    yield
    globals().pop("sum", None)


def step(run: Callable[[Tensor], Tensor], model: nn.Module, layer: Any, x: Tensor) -> list[Tensor | None]:
    """Runs a step from the same Python state of the layer, and returns output and gradients."""
    reset(layer)
    calls, plain, elements = layer.calls, layer.plain, layer.plain.clone()
    model.zero_grad()
    output = run(x)
    output.square().sum().backward()
    layer.calls, layer.plain = calls, plain
    plain.copy_(elements)
    return [output.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]


def compare(
    forward: Forward, change: Callable[[Any], object], checkpoint: str, position: int, held: Any = None
) -> list[str]:
    """Compares steps before and after a change; returns the warnings of layers that run in Python."""
    own = types.FunctionType(
        forward.__code__, globals(), forward.__name__, forward.__defaults__, forward.__closure__
    )
    forward_of_class = lambda self, x: self.own(x) * self.weight  # noqa: E731
    layer = type("ChangedLayer", (Layer,), {"own": own, "forward": forward_of_class})()
    layer.held = held
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(6, 6), nn.Linear(6, 6)]
    layers.insert(position, layer)
    model = nn.Sequential(*layers)
    pipe = GPipe(model, [1, 2], chunks=2, checkpoint=checkpoint)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(5):
            if number == 3:
                change(layer)
            x = torch.randn(4, 6)
            expected = step(lambda x: plain_loop(model, x, 2), model, layer, x)
            ours = step(pipe, model, layer, x)
            for a, b in zip(ours, expected, strict=True):
                assert (a is None) == (b is None)
                assert a is None or b is None or torch.equal(a, b)
    return [str(w.message) for w in caught if "runs in Python" in str(w.message)]


every_mode_and_position = pytest.mark.parametrize(
    ("checkpoint", "position"), list(itertools.product(CHECKPOINT_MODES, (0, 1)))
)


@pytest.mark.sampled(22)
@every_mode_and_position
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_between_calls_is_seen(kind: str, checkpoint: str, position: int) -> None:
    compare(*KINDS[kind], checkpoint, position)


@pytest.mark.sampled(22)
@every_mode_and_position
@pytest.mark.parametrize("name", READS)
def test_a_number_is_read_anew_or_in_python(name: str, checkpoint: str, position: int) -> None:
    read, make, change, warns = READS[name]
    found = compare(
        lambda layer, x: x * read(layer.held),
        lambda layer: change(layer.held),
        checkpoint,
        position,
        make(),
    )
    assert len(found) <= 1
    assert warns is None or warns == bool(found)
    assert all(f"layer {position}" in message for message in found)


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


class AsksForLayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (2 if gradient.is_contiguous() else 7)


class AsksForStrides(AsksForLayout):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * gradient.stride(0)


class WithoutZeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor | None) -> Tensor:
        return first * 5 if second is None else first * 2 + second * 3


@pytest.mark.parametrize("function", [AsksForLayout, AsksForStrides, WithoutZeros])
def test_backwards_that_depend_on_the_gradient_that_arrives(function: type[torch.autograd.Function]) -> None:
    class Calling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found = function.apply(x)  # type: ignore[no-untyped-call]
            return found[0] if isinstance(found, tuple) else found

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Calling())
    pipe = GPipe(model, [1, 1], chunks=2)
    x = torch.randn(4, 6)
    for _ in range(3):
        found = []
        for run in (pipe, lambda x: plain_loop(model, x, 2)):
            model.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run(x).t().contiguous().sin().sum().backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_replaced_tensors_are_not_kept() -> None:
    layer = Layer()
    layer.forward = lambda x: x * layer.plain  # type: ignore[method-assign]
    pipe = GPipe(nn.Sequential(nn.Linear(6, 6), layer), [1, 1], chunks=2)
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(60):
            layer.plain = torch.full((6,), float(number))
            seen.append(weakref.ref(layer.plain))
            assert torch.equal(pipe(torch.ones(4, 6)), pipe[0](torch.ones(4, 6)) * number)
    assert sum(each() is not None for each in seen) < 25
