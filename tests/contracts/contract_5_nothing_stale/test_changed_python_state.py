"""Layers whose Python state changes between calls, in the ways that Python's data model allows.

Every kind must equal the plain loop, before and after the change, whether or not the layer is native.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
import os
import sys
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

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
        self.calls = 0


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
    calls, plain, elements = layer.calls, layer.plain, layer.plain.clone()
    model.zero_grad()
    output = run(x)
    output.square().sum().backward()
    layer.calls, layer.plain = calls, plain
    plain.copy_(elements)
    return [output.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]


@pytest.mark.sampled(25)
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_between_calls_is_seen(kind: str, checkpoint: str, position: int) -> None:
    forward, change = KINDS[kind]
    cls = type(
        "ChangedLayer",
        (Layer,),
        {
            "own": types.FunctionType(
                forward.__code__, globals(), forward.__name__, forward.__defaults__, forward.__closure__
            ),
            "forward": lambda self, x: self.own(x) * self.weight,
        },
    )
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(6, 6), nn.Linear(6, 6)]
    layer = cls()
    layers.insert(position, layer)
    model = nn.Sequential(*layers)
    pipe = GPipe(model, [1, 2], chunks=2, checkpoint=checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(5):
            if number == 3:
                change(layer)
            x = torch.randn(4, 6)
            expected = step(lambda x: plain_loop(model, x, 2), model, layer, x)
            ours = step(pipe, model, layer, x)
            for a, b in zip(ours, expected, strict=True):
                assert (a is None) == (b is None)
                assert a is None or b is None or torch.equal(a, b)


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
