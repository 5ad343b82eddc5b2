"""Layers that read Python state, which changes between calls, in the ways that Python's data model allows.

Every kind must equal the plain loop, before and after the change, whether or not the layer is native. A layer
whose state can be guarded is traced again for the new value and stays native, any other one runs in Python
after one warning (contract 5).
"""

from __future__ import annotations

import functools
import itertools
import math
import queue
import random
import threading
import time
import warnings
import weakref
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

SCALE = 2.0


def read_scale() -> float:
    return SCALE


def backward_scale(gradient: Tensor) -> Tensor:
    return gradient * SCALE


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


AUTO, OTHER = object(), object()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.plain = torch.full((6,), 2.0)
        self.config = Config(2.0)
        self.number = 2.0
        self.table = {"tensor": torch.arange(36.0).view(6, 6)}
        self.mode, self.zero = AUTO, 0.0
        self.calls, self.held = 0, None


def branch_on_elements(layer: Layer, x: Tensor) -> Tensor:
    try:
        scale = float(x.max())
    except Exception:
        scale = 7.0
    return x * scale


def hook_in_forward(layer: Layer, x: Tensor) -> Tensor:
    y = x * layer.weight
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * SCALE)
    return y


def match_config(layer: Layer) -> float:
    match layer.config:
        case Config(scale=scale):
            return scale
    return 1.0


def count_calls(layer: Layer) -> int:
    layer.calls += 1
    return layer.calls


def replace_plain_tensor(layer: Layer) -> Tensor:
    layer.plain = layer.plain + 1
    return layer.plain


def change_plain_tensor(layer: Layer) -> Tensor:
    layer.plain.add_(1)
    return layer.plain.clone()


SCALE_FORMAT = "{.scale}"


def set_global(name: str, value: object) -> None:
    globals()[name] = value


def sets(path: str, value: object) -> Callable[[Any], object]:
    """Returns a function that sets an attribute of a layer, by its path."""
    *parents, name = path.split(".")
    return lambda layer: setattr(functools.reduce(getattr, parents, layer), name, value)


def sets_global(name: str, value: object) -> Callable[[Any], object]:
    return lambda layer: set_global(name, value)


def nothing(layer: Layer) -> None:
    pass


Change = Callable[[Any], object]
# What the forward does with its input.
FORWARDS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Change]] = {
    "exception at elements": (branch_on_elements, nothing),
    "hook in forward": (hook_in_forward, sets_global("SCALE", 9.0)),
    "helper of a backward": (lambda layer, x: ScaledBackward.apply(x), sets_global("SCALE", 9.0)),
    "forward of the class": (
        lambda layer, x: x,
        sets("__class__.forward", lambda layer, x: x * layer.weight * 11),
    ),
    "forward of the object": (
        lambda layer, x: x,
        lambda layer: setattr(layer, "forward", lambda x: x * layer.weight * 8),
    ),
    "patched torch.relu": (
        lambda layer, x: nn.functional.relu(x),
        lambda layer: setattr(torch, "relu", torch.neg),
    ),
}
# By what the forward multiplies its input.
FACTORS: dict[str, tuple[Callable[[Any], Any], Change]] = {
    "attribute of a parameter": (
        lambda layer: getattr(layer.weight, "scale", 1.0),
        sets("weight.scale", 5.0),
    ),
    "class of a parameter": (
        lambda layer: 2.0 if isinstance(layer.weight, nn.Parameter) else 3.0,
        lambda layer: (layer._parameters.pop("weight"), setattr(layer, "weight", torch.ones(6))),
    ),
    "data of a tensor": (lambda layer: layer.plain, sets("plain.data", torch.full((6,), 9.0))),
    "a pattern": (match_config, sets("config.scale", 3.0)),
    "str.format": (lambda layer: float(SCALE_FORMAT.format(layer.config)), sets("config.scale", 3.0)),
    "identity": (
        lambda layer: id(layer.config) % 1000,
        lambda layer: setattr(layer, "config", Config(2.0)),
    ),
    "globals()": (lambda layer: globals()["SCALE"], sets_global("SCALE", 4.0)),
    "code of a function": (
        lambda layer: read_scale(),
        lambda layer: setattr(read_scale, "__code__", (lambda: 5.0).__code__),
    ),
    "number of parameters": (
        lambda layer: len(list(layer.parameters())),
        lambda layer: layer.register_parameter("other", nn.Parameter(torch.ones(6))),
    ),
    "identity of an object": (lambda layer: 2.0 if layer.mode is AUTO else 5.0, sets("mode", OTHER)),
    "minus zero": (lambda layer: math.copysign(2.0, layer.zero), sets("zero", -0.0)),
    "tensor in a dictionary": (
        lambda layer: layer.table["tensor"][0],
        lambda layer: layer.table["tensor"].t_(),
    ),
    "shadowed built-in": (lambda layer: sum([1.0, 2.0]), sets_global("sum", lambda values: 9.0)),
    "counted calls": (count_calls, nothing),
    "replaced tensor": (replace_plain_tensor, nothing),
    "tensor changed in place": (change_plain_tensor, nothing),
}


def forward_of(kind: str) -> tuple[Callable[[Any, Tensor], Tensor], Change]:
    if kind in FORWARDS:
        return FORWARDS[kind]
    read, change = FACTORS[kind]
    return lambda layer, x: x * read(layer), change


class CountingSchedule:
    """A schedule with a side effect: it counts its calls."""

    calls = 0

    def step(self) -> float:
        self.calls += 1
        return 1.0 + self.calls / 8


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


NUMPY, COUNTER = np.random.default_rng(0), 0


def count_in_global() -> float:
    global COUNTER
    COUNTER += 1
    return 1.0 + COUNTER / 8


# Guards see changes of these; reads that catch errors of lookups are not guarded.
READS = {
    "event": Read(lambda held: 1.0 + held.is_set(), threading.Event, lambda held: held.set()),
    # State that the tracer cannot read or guard, or that forward changes.
    "random": Read(lambda held: random.gauss(1, 0.1), warns=True),
    "NumPy generator": Read(lambda held: 1 + NUMPY.random(), warns=True),
    "clock": Read(lambda held: 1.0 + 0 * time.time(), warns=True),
    "counter": Read(lambda held: count_in_global(), warns=True),
    "schedule": Read(lambda held: held.step(), CountingSchedule, warns=True),
    "queue": Read(lambda held: held.get(timeout=60), queue.Queue, warns=True),
    "array of a tensor": Read(lambda held: float(held.numpy()[0]), lambda: torch.ones(2), warns=True),
    "print": Read(lambda held: print(end="") or 1.0, warns=True),
}


def reset(layer: Layer) -> None:
    """Resets counters and generators, so that the pipeline and the loop start from the same state."""
    set_global("COUNTER", 0)
    random.seed(1)
    NUMPY.bit_generator.state = np.random.default_rng(1).bit_generator.state
    if isinstance(layer.held, CountingSchedule):
        layer.held.calls = 0
    if isinstance(layer.held, queue.Queue):
        layer.held.queue.clear()
        for microbatch in range(2):
            layer.held.put(1.0 + microbatch / 8)


@pytest.fixture(autouse=True)
def same_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SCALE", "backward_scale"):
        monkeypatch.setitem(globals(), name, globals()[name])
    set_global("SCALE", 2.0)
    monkeypatch.setattr(read_scale, "__code__", read_scale.__code__)
    monkeypatch.setattr(torch, "relu", torch.relu)
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
    forward: Callable[..., Tensor],
    change: Callable[[Any], object],
    checkpoint: str,
    position: int,
    held: Any = None,
) -> list[str]:
    """Compares steps before and after a change; returns the warnings of layers that run in Python."""
    forward_of_class = lambda self, x: self.own(x) * self.weight  # noqa: E731
    layer = type("ChangedLayer", (Layer,), {"own": forward, "forward": forward_of_class})()
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


class Meta(type):
    scale = 2.0


class Bare(nn.Module, metaclass=Meta):
    """A layer whose forward reads only attributes of its own."""

    __slots__ = ("slot",)

    def __init__(self) -> None:
        super().__init__()
        self.slot, self._own_hooks, self._hooks_zero = 2.0, [1.0], 0.0


# By what the forward multiplies its input.
BARE: dict[str, tuple[Callable[[Any], Any], Change]] = {
    "slot": (lambda layer: layer.slot, sets("slot", 3.0)),
    "type in a slot": (lambda layer: 2 + isinstance(layer.slot, float), sets("slot", 2)),
    "absence": (lambda layer: 2.0 + hasattr(layer, "slot"), lambda layer: delattr(layer, "slot")),
    "list like a table": (lambda layer: len(layer._own_hooks), lambda layer: layer._own_hooks.append(1.0)),
    "minus zero": (lambda layer: math.copysign(2.0, layer._hooks_zero), sets("_hooks_zero", -0.0)),
    "metaclass": (lambda layer: type(layer).scale, lambda layer: setattr(Meta, "scale", 3.0)),
}


@pytest.mark.parametrize("name", BARE)
def test_a_change_of_all_that_a_layer_reads_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, change = BARE[name]
    monkeypatch.setattr(Meta, "scale", Meta.scale)
    layer = type("BareLayer", (Bare,), {"read": read, "forward": lambda self, x: x * self.read()})()
    model = nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 6))
    pipe, x = GPipe(model, [1, 2], chunks=2), torch.randn(4, 6)
    for _ in range(2):
        assert torch.equal(pipe(x), plain_loop(model, x, 2))
    change(layer)
    assert torch.equal(pipe(x), plain_loop(model, x, 2))


every_mode_and_position = pytest.mark.parametrize(
    ("checkpoint", "position"), list(itertools.product(CHECKPOINT_MODES, (0, 1)))
)


@pytest.mark.sampled(14)
@every_mode_and_position
@pytest.mark.parametrize("kind", [*FORWARDS, *FACTORS])
def test_a_change_between_calls_is_seen(kind: str, checkpoint: str, position: int) -> None:
    compare(*forward_of(kind), checkpoint, position)


@pytest.mark.sampled(14)
@every_mode_and_position
@pytest.mark.parametrize("name", READS)
def test_a_number_is_read_anew_or_in_python(name: str, checkpoint: str, position: int) -> None:
    read, make, change, warns = READS[name]
    found = compare(
        lambda layer, x: x * read(layer.held), lambda layer: change(layer.held), checkpoint, position, make()
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


class WithoutZeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor | None) -> Tensor:
        return first * 5 if second is None else first * 2 + second * 3


@pytest.mark.parametrize("function", [AsksForLayout, WithoutZeros])
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
