"""Only layers without effects are repeatable, and a change of what they use is noticed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from gpipe_fast import is_recomputing
from gpipe_fast.skip import skippable, stash
from gpipe_fast.trace.repeatable import LayersState

SCALE = 2.0
PLAIN = torch.ones(6)
LOG: list[float] = []


def scaled(x: Tensor) -> Tensor:
    return x * SCALE if float(x.sum()) > 0 else x


def logged(x: Tensor) -> Tensor:
    LOG.append(float(x.sum()))
    return x


class Layer(nn.Module):
    """Has attributes of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale, self.sizes, self.log, self.number = 2.0, [1, 2], [scaled], 0
        self.plain, self.activation = torch.ones(6), F.gelu
        self.logged, self.hidden = logged, [nn.Linear(6, 6)]
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def helped(self, x: Tensor) -> Tensor:
        return self.activation(x) * self.twice

    @property
    def twice(self) -> float:
        return self.scale * 2

    def counted(self, x: Tensor) -> Tensor:
        self.number += 1
        return x

    @property
    def next_number(self) -> int:
        self.number += 1
        return self.number


def layer_of(forward: Callable[[Any, Any], Any]) -> nn.Module:
    return type("OwnLayer", (Layer,), {"forward": forward})()


def boolean_index(self: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0] = self.linear(x)[x > 0]
    return y


def updates_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.count.add_(1)
    return x * self.count


def asks(self: Any, x: Tensor) -> Tensor:
    if not is_recomputing():
        self.number += 1
        LOG.append(1.0)
    return x


def with_attribute(layer: nn.Module, name: str, value: Any) -> nn.Module:
    setattr(layer, name, value)
    return layer


def with_hook(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, args, output: output * 2)
    return layer


@skippable(stash=["x"])
class Stashes(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("x", x)
        return x * 2 if float(x.sum()) > 0 else x


REPEATABLE: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(6, 6),
    "batch norm": lambda: nn.BatchNorm1d(6),
    "parametrized": lambda: orthogonal(nn.Linear(6, 6)),
    "branch": lambda: layer_of(lambda self, x: self.linear(x) if float(x.sum()) > 0 else x),
    "boolean index": lambda: layer_of(boolean_index),
    "buffer in place": lambda: layer_of(updates_a_buffer),
    "method and property": lambda: layer_of(lambda self, x: self.helped(x)),
    "function": lambda: layer_of(lambda self, x: scaled(x)),
    "reads a list": lambda: layer_of(lambda self, x: x * len(self.sizes) if x.any() else x),
    "reads a tensor": lambda: layer_of(lambda self, x: x * self.plain),
    "comprehension": lambda: layer_of(lambda self, x: sum(x * i for i in range(int(x.max())))),
    "skips": Stashes,
    "asks for its phase": lambda: layer_of(asks),
}


def grows_a_module(self: Any, x: Tensor) -> Tensor:
    self.register_buffer("other", x)
    return x


def writes_a_parameter(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.linear.weight.mul_(0.5)
    return x


def writes_a_tensor(self: Any, x: Tensor) -> Tensor:
    plain = self.plain
    plain += 1
    return x * plain


def changes_a_global(self: Any, x: Tensor) -> Tensor:
    global SCALE
    SCALE += 1
    return x


def counts_in_a_closure() -> nn.Module:
    number = 0

    def forward(self: Any, x: Tensor) -> Tensor:
        nonlocal number
        number += 1
        return x * number

    return layer_of(forward)


def with_default(self: Any, x: Tensor, seen: list[Tensor] = []) -> Tensor:  # noqa: B006
    seen.append(x)
    return x * len(seen)


UNREPEATABLE: dict[str, Callable[[], nn.Module]] = {
    "counter": lambda: layer_of(lambda self, x: self.counted(x)),
    "property": lambda: layer_of(lambda self, x: x * self.next_number),
    "setattr": lambda: layer_of(lambda self, x: setattr(self, "number", 1) or x),
    "list of an attribute": lambda: layer_of(lambda self, x: self.sizes.append(1) or x),
    "global list": lambda: layer_of(lambda self, x: logged(x)),
    "function of an attribute": lambda: layer_of(lambda self, x: self.logged(x)),
    "global number": lambda: layer_of(changes_a_global),
    "closure": counts_in_a_closure,
    "default": lambda: layer_of(with_default),
    "print": lambda: layer_of(lambda self, x: print(x) or x),
    "clock": lambda: layer_of(lambda self, x: x * time.time()),
    "random": lambda: layer_of(lambda self, x: x * random.random()),
    "seed": lambda: layer_of(lambda self, x: torch.manual_seed(1) and x),
    "getattr": lambda: layer_of(lambda self, x: getattr(self, "counted")(x)),  # noqa: B009
    "registers": lambda: layer_of(grows_a_module),
    "parameter": lambda: layer_of(writes_a_parameter),
    "tensor": lambda: layer_of(writes_a_tensor),
    "global tensor": lambda: layer_of(lambda self, x: x * PLAIN.add_(1)),
    "out": lambda: layer_of(lambda self, x: torch.add(x, 1, out=self.plain)),
    "hidden module": lambda: layer_of(lambda self, x: self.hidden[0](x)),
    "hook": lambda: with_hook(nn.Linear(6, 6)),
    "hook within": lambda: nn.Sequential(with_hook(nn.Linear(6, 6))),
    "forward of an object": lambda: with_attribute(nn.Linear(6, 6), "forward", logged),
    "decorator": lambda: layer_of(torch.no_grad()(lambda self, x: x)),
    "compiled": lambda: torch.compile(nn.Linear(6, 6), backend="eager"),  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize("kind", REPEATABLE)
def test_a_layer_without_effects_is_repeatable(kind: str) -> None:
    assert LayersState([nn.Linear(6, 6), REPEATABLE[kind]()]).is_repeatable


@pytest.mark.parametrize("kind", UNREPEATABLE)
def test_a_layer_that_may_have_effects_is_not_repeatable(kind: str) -> None:
    assert not LayersState([nn.Linear(6, 6), UNREPEATABLE[kind]()]).is_repeatable


def test_only_the_module_that_asks_may_have_effects() -> None:
    asking, counting = layer_of(asks), layer_of(lambda self, x: self.counted(x))
    assert not LayersState([asking, counting]).is_repeatable
    assert not LayersState([nn.Sequential(asking, counting)]).is_repeatable


def test_global_hooks_are_not_repeatable() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        assert not LayersState([nn.Linear(6, 6)]).is_repeatable
    finally:
        handle.remove()


def uses_all(self: Any, x: Tensor) -> Tensor:
    return self.helped(scaled(self.linear(x))) * self.plain * len(self.sizes)


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], object]] = {
    "attribute": lambda layer, patch: setattr(layer, "scale", 3.0),
    "mode": lambda layer, patch: layer.linear.eval(),
    "item": lambda layer, patch: layer.sizes.append(3),
    "tensor": lambda layer, patch: layer.plain.add_(1),
    "function": lambda layer, patch: setattr(layer, "activation", F.silu),
    "code": lambda layer, patch: patch.setattr(scaled, "__code__", logged.__code__),
    "global": lambda layer, patch: patch.setitem(globals(), "SCALE", 3.0),
    "method": lambda layer, patch: patch.setattr(Layer, "helped", Layer.counted),
    "hook": lambda layer, patch: with_hook(layer.linear),
    "parameter": lambda layer, patch: setattr(layer.linear, "weight", nn.Parameter(torch.ones(6, 6))),
    "submodule": lambda layer, patch: setattr(layer, "linear", nn.Linear(6, 6)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_of_what_a_layer_uses_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(uses_all)
    state = LayersState([layer])
    assert state.is_repeatable
    layer(torch.ones(2, 6)).sum().backward()
    layer.count.add_(1)
    assert state.is_unchanged()
    CHANGES[kind](layer, monkeypatch)
    assert not state.is_unchanged()
