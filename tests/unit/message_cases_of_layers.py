"""Layers that trigger the errors and warnings of gpipe_fast."""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gpipe_fast import GPipe, is_recomputing, keyed_rng
from gpipe_fast.arguments import warn_idle_stages
from gpipe_fast.skip import Namespace, pop, skippable, stash
from tests.unit.message_cases import Case, call, call_with_a_global_hook, case, features, mlp, pipe


class FunctionLayer(nn.Module):
    """Applies a function to a linear layer and the input."""

    def __init__(self, function: Callable[[Any, Any], object]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def of(function: Callable[[Any, Any], object], *args: Any, **options: Any) -> object:
    """Calls a pipeline of one layer that applies this function."""
    return call(*(args or (features(),)), layers=(FunctionLayer(function),), **options)


# Tracing, and layers in Python


def in_aten(function: Callable[[Any, Any], object]) -> Callable[[], object]:
    return functools.partial(of, function, backend="aten")


def replace_a_buffer(layer: Any, x: Tensor) -> Any:
    layer.count = layer.count + 1
    return x + layer.count


def branch(layer: Any, x: Tensor) -> Any:
    return layer.linear(x) if float(x.sum()) > -1e9 else x


def replace_data_before_a_recompute() -> None:
    layer = FunctionLayer(branch)
    output = call(features(), layers=(layer,), checkpoint="always")
    layer.linear.weight.data = layer.linear.weight.data.clone()
    output.sum().backward()  # type: ignore[attr-defined]


def change_a_layer_before_a_recompute() -> None:
    layer = FunctionLayer(branch)
    output = call(features(), layers=(layer,), checkpoint="always")
    layer.eval()
    output.sum().backward()  # type: ignore[attr-defined]


def catch_a_lookup(layer: Any, x: Tensor) -> Any:
    try:
        return x * layer.absent
    except AttributeError:
        return x


def replace_a_tensor() -> None:
    layer = FunctionLayer(lambda layer, x: x * layer.mask)
    model = pipe(layer, backend="aten")
    for _ in range(20):
        layer.mask = torch.ones(6)
        model(features())


@torch.compiler.allow_in_graph
def untraced(x: Tensor) -> Tensor:
    return x * 2


@torch.compiler.assume_constant_result
def constant() -> float:
    return 2.0


@functools.cache
def cached() -> float:
    return 2.0


class AnsweringClass(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return True


class Answering(metaclass=AnsweringClass):
    pass


def twos() -> Iterator[float]:
    while True:
        yield 2.0


NUMPY_NUMBER = np.float64(2)
GENERATOR = twos()
KEPT = torch.ones(6)
REFERENCE = weakref.ref(KEPT)


def change_another_layer() -> None:
    def change(layer: Any, x: Tensor) -> Any:
        other.count = getattr(other, "count", 0) + 1
        return x

    other = nn.ReLU()
    model = pipe(FunctionLayer(change), other)
    for _ in range(3):
        model(features())


def change_a_layer_before_the_backward() -> None:
    dropout = nn.Dropout(0.5)
    output = call(features(), layers=(nn.Linear(6, 6), dropout))
    dropout.p = 0.25
    output.sum().backward()  # type: ignore[attr-defined]


class _Particular(torch.autograd.Function):
    """Its backward can be traced for contiguous gradients only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view(-1).view_as(gradient) * 2  # an error unless the gradient is contiguous


class _AsksForLayout(_Particular):
    """Its backward depends on the layout of its gradient."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2 if gradient.is_contiguous() else gradient + gradient


def receive_gradients_in_another_layout() -> None:
    output = of(lambda layer, x: _Particular.apply(layer.linear(x)))
    output.t().contiguous().sin().sum().backward()  # type: ignore[attr-defined]


def call_out_of_order() -> None:
    layers = mlp()
    with keyed_rng(layers):
        layers[1](features())


OUTSIDE = torch.ones(6, requires_grad=True)
COUNTER = torch.ones(6)
DRAWN = "has no keyed counterpart"

TRACING = [
    case(
        "layer 0 (LSTM)",
        "pass backend='auto'",
        call,
        features()[None],
        layers=(nn.LSTM(6, 6),),
        backend="aten",
    ),
    case(
        "layer 0 (LazyLinear)", "run one batch", call, features(), layers=(nn.LazyLinear(2),), backend="eager"
    ),
    Case(
        "layer 0 (FunctionLayer)",
        "backend='auto'",
        in_aten(lambda layer, x: x if is_recomputing() else -x),
    ),
    Case("layer 0 (FunctionLayer)", "backend='auto'", in_aten(replace_a_buffer)),
    Case("got set", "may be nested in tuples", in_aten(lambda layer, x: {x})),
    Case(f"aten.poisson.default {DRAWN}", "backend='auto'", in_aten(lambda layer, x: torch.poisson(x.abs()))),
    Case(
        f"torch.complex64 {DRAWN}",
        "",
        in_aten(lambda layer, x: torch.randn_like(x, dtype=torch.complex64) * x),
    ),
    Case(
        "layer 0 (FunctionLayer)",
        "backend='auto'",
        in_aten(lambda layer, x: x + torch.rand(6, generator=torch.Generator())),
    ),
    Case("draws from Python's random", "backend='auto'", in_aten(lambda layer, x: x * random.random())),
    Case("changes a tensor", "backend='auto'", in_aten(lambda layer, x: x + COUNTER.add_(1))),
    Case("through a weak reference", "backend='auto'", in_aten(lambda layer, x: x + REFERENCE())),
    Case("a number or tensor that", "backend='auto'", in_aten(lambda layer, x: x * NUMPY_NUMBER)),
    Case("told not to trace", "backend='auto'", in_aten(lambda layer, x: untraced(x))),
    Case("was told not to trace", "backend='auto'", in_aten(lambda layer, x: x * constant())),
    Case("an iterator", "GENERATOR", in_aten(lambda layer, x: x * next(GENERATOR))),
    Case("a metaclass", "Answering", in_aten(lambda layer, x: x * isinstance(layer, Answering))),
    Case("a cache", "cached", in_aten(lambda layer, x: x * cached())),
    Case("may catch AttributeError", "backend='auto'", in_aten(catch_a_lookup)),
    Case("was replaced 16 times", "register it as a buffer", replace_a_tensor),
    Case("is_contiguous()", "backend='auto'", in_aten(lambda own, x: _AsksForLayout.apply(own.linear(x)))),
    case(
        "its argument is not made of",
        "got set",
        call,
        features(),
        layers=(FunctionLayer(lambda layer, x: {x}), FunctionLayer(lambda layer, x: x.pop())),
        backend="aten",
    ),
    case("got set", "may be nested in tuples", of, lambda layer, x: {x}, backend="eager"),
    case(
        "of shape [6]", "make it a parameter", of, lambda layer, x: layer.linear(x) * OUTSIDE, backend="eager"
    ),
    case("layer 0 (FunctionLayer)", "replace the data after", replace_data_before_a_recompute),
    case("layer 0 (FunctionLayer)", "change it after the backward", change_a_layer_before_a_recompute),
    case("changed what other layers read", "pass backend='eager'", change_another_layer),
    case("stage 0", "call the module again", change_a_layer_before_the_backward),
    case("stage 0", "backend='eager'", receive_gradients_in_another_layout),
    case(
        "layer '1' (SyncBatchNorm)",
        "BatchNorm1d",
        pipe,
        nn.ReLU(),
        nn.SyncBatchNorm(4),
        deferred_batch_norm=True,
    ),
    case(
        "layer '0' (OwnBatchNorm)",
        "BatchNorm1d",
        lambda: pipe(type("OwnBatchNorm", (nn.BatchNorm1d,), {})(4), deferred_batch_norm=True),
    ),
    case("got a ReLU", "expected layer 0 (Linear)", call_out_of_order),
]


def enter(context: Any) -> None:
    with context:
        pass


def draw_in_a_checkpoint() -> None:
    layers = nn.Sequential(
        FunctionLayer(
            lambda layer, x: checkpoint(torch.dropout, layer.linear(x), 0.5, True, use_reentrant=False)
        )
    )
    with keyed_rng(layers):
        layers(features())


RANDOMNESS = [
    case("is Linear", "nn.Sequential", lambda: enter(keyed_rng(nn.Linear(2, 2)))),  # type: ignore[arg-type]
    case("got 'a'", "64-bit integer", lambda: enter(keyed_rng(mlp(), "a"))),  # type: ignore[arg-type]
    case("(FunctionLayer) runs in Python", "checkpoint", of, branch, memory="1GiB"),
    case("torch.utils.checkpoint", "GPipe's checkpoint argument", draw_in_a_checkpoint),
]

# Outputs


OUTPUTS = [
    case("(..., 4) and (..., 3)", "same nesting", of, lambda layer, x: (x, len(x)), features(7)),
    case("returned 3 of type int", "return a tensor", of, lambda layer, x: 3),
    case("output 0", "dimension is the batch", of, lambda layer, x: layer.linear(x).sum()),
    case("shape [4, 6]", "return a tensor", of, lambda layer, x: x.t(), torch.ones(6, 8), batch_dim=1),
]

# Skip connections


def skips(forward: Any, stashes: tuple[str, ...] = (), pops: tuple[str, ...] = ()) -> nn.Module:
    layer = type("Layer", (nn.Module,), {"forward": forward})
    return skippable(stash=stashes, pop=pops)(layer)()


def stash_as(name: str) -> Any:
    def forward(self: nn.Module, x: Tensor) -> Any:
        yield stash(name, x)
        return x

    return forward


def stash_pair(self: Any, x: Tensor) -> Any:
    yield stash("a", (x, x))
    return x


def pop_as(*names: str) -> Any:
    def forward(self: nn.Module, x: Tensor) -> Any:
        for name in names:
            x = x + (yield pop(name))
        return x

    return forward


def yield_a_number(self: nn.Module, x: Tensor) -> Any:
    yield 3
    return x


def unchanged(self: nn.Module, x: Tensor) -> Tensor:
    return x


def run(*layers: nn.Module) -> object:
    return nn.Sequential(*layers)(features())


class Unused(nn.Module):
    """Holds a layer that it does not call."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x


A, B = ("a",), ("b",)

SKIPS = [
    case("'b'", "declares 'a'", lambda: skips(stash_as("a"), A).isolate(Namespace(), only=B)),  # type: ignore[operator]
    case("'a' has not been stashed", "", run, skips(pop_as("a"), (), A)),
    case("'a' must be stashed", "", run, skips(unchanged, A)),
    case("'a' must be popped", "", run, skips(stash_as("a"), A), skips(unchanged, (), A)),
    case("'b' has not been declared as stashable", "", run, skips(stash_as("b"), A)),
    case("'b' has not been declared as poppable", "", run, skips(pop_as("b"))),
    case("got a tuple", "stash each tensor", run, skips(stash_pair, A), skips(pop_as("a"), (), A)),
    case("'a' has been popped already", "", run, skips(stash_as("a"), A), skips(pop_as("a", "a"), (), A)),
    case("3 is not a command", "@skippable", run, skips(yield_a_number)),
    case("got 'skip'", "stash=['skip']", skippable, stash="skip"),
    case("'0' declared 'a' as poppable", "not stashed", pipe, skips(pop_as("a"), (), A)),
    case(
        "'a' must be stashed",
        "",
        call,
        features(),
        layers=(Unused(skips(stash_as("a"), A)), skips(pop_as("a"), (), A)),
        balance=[1, 1],
        backend="eager",
    ),
]

OF_LAYERS = [*TRACING, *RANDOMNESS, *OUTPUTS, *SKIPS]

# Warnings


class Spy(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class NotCopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies")


def call_few_microbatches() -> None:
    warn_idle_stages.cache_clear()
    call(features())


def call_few_samples() -> None:
    warn_idle_stages.cache_clear()
    call(features(2))


def call_under_a_mode() -> None:
    with Spy():  # type: ignore[no-untyped-call]
        call(features())


def measure_in_vain() -> None:
    GPipe(nn.Sequential(NotCopied(6, 6), nn.Tanh()), devices=["cpu"] * 2, chunks=8)(features())


def prepare_in_vain() -> None:
    pipe(FunctionLayer(branch)).prepare(features())


WARNINGS_OF_LAYERS = [
    case("stage 0, layer 0 (FunctionLayer) runs in Python: ", "other layers are unaffected", of, branch),
    case("2 micro-batches on 2 stages", "chunks=8 or chunks='auto'", call_few_microbatches),
    case("9 devices were passed for 5 layers", "pass 5 devices", pipe, balance=None, devices=["cpu"] * 9),
    case("a mini-batch of 2 samples", "pass more samples", call_few_samples),
    case("stage 0, layer 0 (GRU)", "pass batch_dim=1", call, torch.ones(8, 3, 6), layers=(nn.GRU(6, 6),)),
    case("layer '0' (NotCopied)", "pass balance=", measure_in_vain),
    case("stage 0, layer 0 (FunctionLayer) cannot be", "takes longer the first time", prepare_in_vain),
    case("hook call_with_a_global_hook", "remove it", call_with_a_global_hook, "auto"),
    case("Spy sees nothing", "plain Sequential", call_under_a_mode),
]
