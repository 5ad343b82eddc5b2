"""Layers that trigger the errors and warnings of gpipe_fast."""

from __future__ import annotations

import functools
import random
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import BaseTorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gpipe_fast import GPipe, keyed_rng
from gpipe_fast.arguments import warn_idle_stages
from gpipe_fast.fuse import cubins
from gpipe_fast.skip import Namespace, pop, skippable, stash
from tests.unit.message_cases import call, call_with_a_global_hook, case, features, mlp, pipe


class FunctionLayer(nn.Module):
    """Applies a function to a linear layer and the input."""

    def __init__(self, function: Callable[[Any, Any], object]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def of(function: Callable[[Any, Any], object], *args: Any, **options: Any) -> object:
    """Calls a pipeline of one layer that applies this function."""
    return call(*(args or (features(),)), layers=(FunctionLayer(function),), **options)


# Tracing, and layers in Python


in_aten = functools.partial(of, backend="aten")


def draw_from_an_own_generator(layer: Any, x: Tensor) -> Any:
    return x + torch.rand(6, generator=torch.Generator())


def branch(layer: Any, x: Tensor) -> Any:
    return layer.linear(x) if float(x.sum()) > -1e9 else x


def change_before_a_recompute(change: Callable[[Any], object]) -> None:
    layer = FunctionLayer(branch)
    output = call(features(), layers=(layer,), checkpoint="always")
    change(layer)
    output.sum().backward()  # type: ignore[attr-defined]


def replace_data(layer: Any) -> None:
    layer.linear.weight.data = layer.linear.weight.data.clone()


def catch_a_lookup(layer: Any, x: Tensor) -> Any:
    try:
        return x * ABSENT  # type: ignore[name-defined]
    except NameError:
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


@functools.cache
def cached(number: Any) -> float:
    return 2.0


class AnsweringClass(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return True


Answering = AnsweringClass("Answering", (), {})


class OwnProperty(property):
    def __get__(self, instance: object, owner: type | None = None) -> float:
        return 2.0


HAS_OWN_PROPERTY = type("HasOwnProperty", (), {"scale": OwnProperty(lambda self: 1.0)})()
NUMPY_NUMBER, ARRAY = np.float64(2), np.array(2.0)


def twos() -> Iterator[float]:
    while True:
        yield 2.0


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


def doubling(backward: Callable[[Any, Tensor], Tensor]) -> Any:
    own = {"forward": staticmethod(lambda ctx, x: x * 2), "backward": staticmethod(backward)}
    return type("Doubling", (torch.autograd.Function,), own)


# The first backward depends on the layout of its gradient; the other is an error unless it is contiguous.
ASKS_FOR_LAYOUT = doubling(lambda ctx, gradient: gradient * (2 if gradient.is_contiguous() else 4))
NEEDS_LAYOUT = doubling(lambda ctx, gradient: gradient.view(-1).view_as(gradient) * 2)


def receive_gradients_in_another_layout() -> None:
    output = of(lambda layer, x: NEEDS_LAYOUT.apply(layer.linear(x)))
    output.t().contiguous().sin().sum().backward()  # type: ignore[attr-defined]


def call_out_of_order() -> None:
    layers = mlp()
    with keyed_rng(layers):
        layers[1](features())


OUTSIDE = torch.ones(6, requires_grad=True)
COUNTER = torch.ones(6)
DRAWN = "has no keyed counterpart"

OWN_BATCH_NORM = type("OwnBatchNorm", (nn.BatchNorm1d,), {})(4)
COMPLEX = functools.partial(torch.randn_like, dtype=torch.complex64)


def returning_a_set(layer: Any, x: Tensor) -> Any:
    return {x}


def popping_a_set() -> object:
    layers = FunctionLayer(returning_a_set), FunctionLayer(lambda layer, x: x.pop())
    return call(features(), layers=layers, backend="aten")


def register_a_parameter(layer: Any, x: Tensor) -> Any:
    layer.late = nn.Parameter(torch.ones(()))
    return layer.linear(x) * layer.late


def hook_a_parameter(layer: nn.Module, x: Tensor) -> Tensor:
    layer.get_parameter("linear.weight").register_hook(torch.neg)
    return x


TRACING = [
    case("layer 0 (LazyLinear)", "run one", call, features(), layers=(nn.LazyLinear(2),), backend="eager"),
    case("got set", "may be nested in tuples", in_aten, returning_a_set),
    case(f"aten.poisson.default {DRAWN}", "backend='auto'", in_aten, lambda layer, x: torch.poisson(x.abs())),
    case(f"torch.complex64 {DRAWN}", "", in_aten, lambda layer, x: COMPLEX(x) * x),
    case("(FunctionLayer)", "backend='auto'", in_aten, draw_from_an_own_generator),
    case("draws from Python's random", "backend='auto'", in_aten, lambda layer, x: x * random.random()),
    case("changes a tensor", "backend='auto'", in_aten, lambda layer, x: x + COUNTER.add_(1)),
    case("through a weak reference", "backend='auto'", in_aten, lambda layer, x: x + REFERENCE()),
    case("a number or tensor that", "backend='auto'", in_aten, lambda layer, x: x * NUMPY_NUMBER),
    case("told not to trace", "backend='auto'", in_aten, lambda layer, x: untraced(x)),
    case("calls unsafe_chunk", "backend='auto'", in_aten, lambda layer, x: x.unsafe_chunk(2)[0]),
    case("reads _base of", "backend='auto'", in_aten, lambda layer, x: x if x._base is None else -x),
    case("registers a hook on", "backend='auto'", in_aten, hook_a_parameter),
    case("an iterator", "GENERATOR", in_aten, lambda layer, x: x * next(GENERATOR)),
    case("an array of NumPy", "ARRAY", in_aten, lambda layer, x: x * float(ARRAY)),
    case("how a property is read", "backend='auto'", in_aten, lambda layer, x: x * HAS_OWN_PROPERTY.scale),
    case(
        "class overrides built-in methods",
        "Answering",
        in_aten,
        lambda layer, x: x * isinstance(layer, Answering),
    ),
    case("a cache", "cached", in_aten, lambda layer, x: x * cached(layer)),
    case("may catch NameError", "backend='auto'", in_aten, catch_a_lookup),
    case("was replaced 16 times", "register it as a buffer", replace_a_tensor),
    case("is_contiguous()", "backend='auto'", in_aten, lambda own, x: ASKS_FOR_LAYOUT.apply(own.linear(x))),
    case("its argument is not made of", "got set", popping_a_set),
    case("got set", "may be nested in tuples", of, returning_a_set, backend="eager"),
    case("of shape [6]", "a parameter", of, lambda own, x: own.linear(x) * OUTSIDE, backend="eager"),
    case("layer 0 (FunctionLayer)", "replace the data after", change_before_a_recompute, replace_data),
    case("layer 0 (FunctionLayer)", "change it after", change_before_a_recompute, nn.Module.eval),
    case("changed what other layers read", "pass backend='eager'", change_another_layer),
    case("had 2 parameters, and has 3", "such as in __init__", of, register_a_parameter),
    case("stage 0", "call the module again", change_a_layer_before_the_backward),
    case("stage 0", "backend='eager'", receive_gradients_in_another_layout),
    case("layer '0' (SyncBatchNorm)", "BatchNorm1d", pipe, nn.SyncBatchNorm(4), deferred_batch_norm=True),
    case("layer '0' (OwnBatchNorm)", "BatchNorm1d", pipe, OWN_BATCH_NORM, deferred_batch_norm=True),
    case("got a ReLU", "expected layer 0 (Linear)", call_out_of_order),
]


def enter(context: Any) -> None:
    with context:
        pass


def draw_in_a_checkpoint() -> None:
    dropout = functools.partial(checkpoint, torch.dropout, use_reentrant=False)
    layers = nn.Sequential(FunctionLayer(lambda layer, x: dropout(layer.linear(x), 0.5, True)))
    with keyed_rng(layers):
        layers(features())


RANDOMNESS = [
    case("is Linear", "nn.Sequential", lambda: enter(keyed_rng(nn.Linear(2, 2)))),  # type: ignore[arg-type]
    case("got 'a'", "64-bit integer", lambda: enter(keyed_rng(mlp(), "a"))),  # type: ignore[arg-type]
    case("(FunctionLayer) runs in Python", "checkpoint", of, branch, memory="1GiB"),
    case("torch.utils.checkpoint", "GPipe's checkpoint argument", draw_in_a_checkpoint),
]

# Outputs


class Both(nn.Module):
    """Returns both of two tensors."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y * 2


SQUARES = torch.ones(8, 4), torch.ones(4, 8)

OUTPUTS = [
    case("(..., 4) and (..., 3)", "same nesting", of, lambda layer, x: (x, len(x)), features(7)),
    case("returned 3 of type int", "return a tensor", of, lambda layer, x: 3),
    case("output 0", "dimension is the batch", of, lambda layer, x: layer.linear(x).sum()),
    case("shape [4, 6]", "return a tensor", of, lambda layer, x: x.t(), torch.ones(6, 8), batch_dim=1),
    case("or in 1", "pass inputs whose", call, *SQUARES, layers=(Both(),), batch_dim=(0, 1)),
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


def without_a_call(skipped: nn.Module) -> object:
    layer = FunctionLayer(lambda layer, x: x)
    layer.unused = skipped
    return call(features(), layers=(layer, skips(pop_as("a"), (), A)), balance=[1, 1], backend="eager")


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
    case("'a' must be stashed", "", without_a_call, skips(stash_as("a"), A)),
]

OF_LAYERS = [*TRACING, *RANDOMNESS, *OUTPUTS, *SKIPS]

# Warnings


class NotCopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies")


def call_with_idle_stages(samples: int) -> None:
    warn_idle_stages.cache_clear()
    call(features(samples))


@torch.library.custom_op("gpipe_fast_tests::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight)


@product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def call_under_autocast() -> None:
    layer = FunctionLayer(lambda self, x: product(x, torch.ones(6, 6)))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        pipe(layer)(features())


def call_under_a_mode() -> None:
    with BaseTorchDispatchMode():
        call(features())


def measure_in_vain() -> None:
    GPipe(nn.Sequential(NotCopied(6, 6), nn.Tanh()), devices=["cpu"] * 2, chunks=8)(features())


def prepare_in_vain() -> None:
    pipe(FunctionLayer(branch)).prepare(features())


def keep_kernels_where_a_file_is() -> None:
    with tempfile.NamedTemporaryFile() as file:
        cubins._writable_folder(str(Path(file.name) / "cubins"))


WARNINGS_OF_LAYERS = [
    case(
        "stage 0, layer 0 (FunctionLayer) runs in Python: ", "in the first call of each new shape", of, branch
    ),
    case("2 micro-batches on 2 stages", "chunks=8 or chunks='auto'", call_with_idle_stages, 8),
    case("9 devices were passed for 5 layers", "pass 5 devices", pipe, balance=None, devices=["cpu"] * 9),
    case("a mini-batch of 2 samples", "pass more samples", call_with_idle_stages, 2),
    case("stage 0, layer 0 (GRU)", "pass batch_dim=1", call, torch.ones(8, 3, 6), layers=(nn.GRU(6, 6),)),
    case("layer '0' (NotCopied)", "pass balance=", measure_in_vain),
    case("layer 0 (FunctionLayer) cannot be", "takes longer the first time", prepare_in_vain),
    case("hook call_with_a_global_hook", "remove it", call_with_a_global_hook, "auto"),
    case("product.default computes in torch.float32", "let the layer compute in", call_under_autocast),
    case("BaseTorchDispatchMode sees nothing", "plain Sequential", call_under_a_mode),
    case("kernels cannot be kept in", "set GPIPE_FAST_CACHE", keep_kernels_where_a_file_is),
]
