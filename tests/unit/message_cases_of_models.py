"""Models that trigger the errors and warnings of `GPipe.from_model`."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, keyed_rng
from gpipe_fast.from_model.layer import _paths, _Writer
from tests.unit.message_cases import Case, case


class Between(nn.Module):
    """Two blocks, and a function of the model and a tensor between them."""

    def __init__(self, function: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.bias = nn.Parameter(torch.zeros(4))
        self.plain_function = function
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, **more: Any) -> Any:
        x = self.blocks[0](x)
        x = x if self.plain_function is None else self.plain_function(self, x)
        return self.blocks[1](x)


class After(Between):
    """Two blocks, and a function of the model, the input and the output of the blocks."""

    def forward(self, x: Tensor, **more: Any) -> Any:
        assert self.plain_function is not None
        return self.plain_function(x, self.blocks[1](self.blocks[0](x)), **more)


class Writes(nn.Module):
    """A block that writes to a dict, and one that gets a value of an odd kind."""

    def forward(self, x: Tensor, shared: Any) -> Tensor:
        if isinstance(shared, dict):
            shared[len(shared)] = x
        return x * 1


class Shares(nn.Module):
    """Blocks that get an argument besides the tensor."""

    def __init__(self, argument: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Writes(), Writes()])
        self.argument = argument

    def forward(self, x: Tensor) -> Tensor:
        shared = self.argument() if callable(self.argument) else self.argument
        for block in self.blocks:
            x = block(x, shared=shared)
        return x


class Order(nn.Module):
    """Blocks that are called in this order."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


@dataclass
class Pair:
    """An object that PyTorch does not flatten."""

    x: Any


X = torch.randn(6, 4)


def cut(model: nn.Module, *args: Any, kwargs: Any = None, **options: Any) -> Any:
    options = {"devices": ["cpu", "cpu"], "chunks": 3, **options}
    return GPipe.from_model(model, args or (X,), kwargs, **options)


def between(function: Callable[[Any, Tensor], Any]) -> Callable[[], object]:
    return lambda: cut(Between(function))


def after(function: Callable[[Tensor, Tensor], Any], **options: Any) -> Callable[[], object]:
    return lambda: cut(After(function), **options)


class Bound(torch.autograd.Function):
    """A function whose apply is bound before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


bound = Bound.apply


def seed(model: Any, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return x


def draw(model: Any, x: Tensor) -> Tensor:
    return x * random.random()


def set_attribute(model: Any, x: Tensor) -> Tensor:
    model.last = 3
    return x


def append(model: Any, x: Tensor) -> Tensor:
    model.seen.append(x)
    return x


def add_to_parameter(model: Any, x: Tensor) -> Tensor:
    model.bias.detach().add_(1)
    model.running.add_(1)
    return x


def with_a_buffer() -> object:
    model = Between(add_to_parameter)
    model.register_buffer("running", torch.zeros(4))
    return cut(model)


def with_hooks_of(name: str) -> object:
    model = Between()
    if name == "accelerate":
        model.blocks[1]._hf_hook = object()
    else:
        model.inner = Between()
        model.forward = lambda x: model.inner(x)
        model.inner.register_forward_hook(print)
        return cut(model, blocks="inner.blocks")
    return cut(model)


def collecting() -> object:
    collector: ContextVar[Any] = ContextVar("collector")
    collector.set({"hidden_states": []})
    module = types.SimpleNamespace(_active_collector=collector)
    with mock.patch.dict(sys.modules, {"transformers.utils.output_capturing": module}):
        return cut(Between())


def quantized() -> object:
    model = Between()
    model.blocks[0].weight.quant_state = object()
    return cut(model)


class InPlace(nn.Module):
    """Changes a tensor in place after a block, whose alias an earlier layer made."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        base = x * 2
        alias = base[:, :2]
        x = self.blocks[0](x)
        base += 1
        return self.blocks[1](x + base) + alias.sum()


def branch_by_batch(x: Tensor, y: Tensor) -> Tensor:
    return y.relu() if len(x) > 4 else y.tanh()


def move(method: str) -> object:
    model = cut(Between(), balance=[1, 1])
    return getattr(model, method)()


def replace_forward() -> None:
    cut(Between()).forward = print


def again() -> object:
    return cut(cut(Between()))


def with_a_cache() -> object:
    return cut(Between())(X, past_key_values=object())


def unknown_tensor(model: Any, x: Tensor) -> Tensor:
    return x + CONSTANT


CONSTANT = torch.ones(4)


class Stranger(nn.Module):
    """Creates a module with parameters in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](LINEAR(self.blocks[0](x)))


LINEAR = nn.Linear(4, 4)
NESTED = nn.Sequential(nn.ModuleDict({"0": nn.Linear(4, 4), "1": nn.ReLU()}), nn.ReLU())


def backward_in_forward(model: Any, x: Tensor) -> Tensor:
    x.register_hook(print)
    return x


class Scripted(nn.Module):
    """Calls a function of TorchScript, which PyTorch does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](twice(self.blocks[0](x)))


def twice(x: Tensor) -> Tensor:
    return x * 2


def scripted() -> object:
    with mock.patch.dict(globals(), {"twice": torch.jit.script(twice)}):
        return cut(Scripted())


class ReturnsParameter(Between):
    """Returns a parameter."""

    def forward(self, x: Tensor, **more: Any) -> Any:
        return super().forward(x), self.bias


def out_of_order() -> None:
    model = cut(Between())
    with keyed_rng(model):
        model.blocks[1](X)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x.square().sum(1) * mask).sum() / mask.sum()


def nothing_counts() -> object:
    x, mask = torch.ones(2, 4), torch.tensor([1.0, 0.0])
    model = GPipe.from_model(Masked(), (x, mask), balance=[1, 1], devices=["cpu"] * 2, chunks=2)
    return model(x, mask)


def with_labels(x: Tensor, y: Tensor, labels: Tensor | None = None) -> Tensor:
    return y if labels is None else (y - labels).square().mean()


def with_a_loss(method: str, **arguments: Any) -> object:
    return getattr(cut(After(with_labels)), method)(X, **arguments)


class Resizable(Between):
    def resize_token_embeddings(self, number: int) -> None: ...


def resize_with_gradients() -> None:
    model = cut(Resizable())
    model(X).sum().backward()
    model.resize_token_embeddings(9)


def set_placement(name: str, value: Any) -> None:
    setattr(cut(Between()), name, value)


OF_MODELS = [
    case(
        "got [1, 1]", "GPipe.from_model(model.plain(), ..., balance=[1, 1])", set_placement, "balance", [1, 1]
    ),
    case("got ['cpu']", "GPipe.from_model(model.plain(), ..., devices=", set_placement, "devices", ["cpu"]),
    case("got 3", "GPipe.from_model(model.plain(), ..., memory=3)", set_placement, "memory_limit", 3),
    case("resize_token_embeddings(9)", "before GPipe.from_model", resize_with_gradients),
    case("step got target=, loss_fn=", "such as labels=", with_a_loss, "step", target=X, loss_fn=torch.sum),
    case("report got loss_fn=", "loss_fn(model(...), target)", with_a_loss, "report", loss_fn=torch.sum),
    case("argument 0 is a list of 2", "model(*tensors)", lambda: cut(Between())([X, X])),
    case("argument 0 is a tuple of 1", "model(*tensors)", lambda: cut(Between(), (X,))),
    case("argument 'x' is a dict of 1", "model(**tensors)", lambda: cut(Between())(x={"x": X})),
    case("in micro-batch 1 of 2, nothing counts", "use fewer chunks", nothing_counts),
    case("got int", "must be an nn.Module", GPipe.from_model, 3, (X,)),
    case("got list", "pass (x,)", GPipe.from_model, Between(), [X]),
    case("got list", "a dict of keyword arguments", GPipe.from_model, Between(), (X,), [X]),
    case("got 'mean'", "'per-microbatch'", GPipe.from_model, Between(), (X,), loss="mean"),
    case("records a call", "meta device do", GPipe.from_model, Between()),
    case("Between is pipelined already", "model.plain()", again),
    case("blocks.1 has a hook of accelerate", "without device_map", with_hooks_of, "accelerate"),
    case("blocks.0 (Linear) is quantized", "without quantization", quantized),
    case("inner (Between) contains blocks and has hooks", "on its blocks", with_hooks_of, "inner"),
    case("blocks=[] names no module", "", lambda: cut(Between(), blocks=[])),
    case("no module 'layers'", "its lists are ['blocks']", lambda: cut(Between(), blocks="layers")),
    case("no module of class GELU", "", lambda: cut(Between(), blocks=nn.GELU)),
    case("got int", "names of modules, modules or classes", lambda: cut(Between(), blocks=[3])),
    case("a Linear was passed", "no module of the model", lambda: cut(Between(), blocks=[LINEAR])),
    case("0.0 is inside of block 0", "name one of them", lambda: cut(NESTED, blocks=["0.0", "0"])),
    case(
        "blocks.0 (Linear) is called 2 times", "blocks=...", lambda: cut(Order(0, 0, 1, 2), blocks="blocks")
    ),
    case("blocks.2 (Linear) is not called", "blocks=...", lambda: cut(Order(0, 1), blocks="blocks")),
    case("blocks.1 comes before blocks.0", "blocks=...", lambda: cut(Order(1, 0, 2), blocks="blocks")),
    case("Linear calls no two modules", "blocks=...", lambda: cut(nn.Linear(4, 4))),
    case("adds up to 7", "the 2 blocks, or to 4", lambda: cut(Between(), balance=[3, 4])),
    case("got past_key_values", "model.plain().generate", with_a_cache),
    case("got [[]]", "a batch dimension", lambda: cut(Between(), torch.tensor(1.0))),
    case("calls another function at", "blocks=...", after(branch_by_batch)),
    case("which depends on a Linear", "blocks=...", between(lambda m, x: x if x.sum() > 0 else -x)),
    case("writes to 'shared'", "side channel", lambda: cut(Shares(dict))),
    case(
        "block blocks.0: a Pair is passed",
        "as 'shared'; it may be a side channel",
        lambda: cut(Shares(Pair(3))),
    ),
    case("writes to seen, a side channel", "blocks=...", between(append)),
    case("sets last, a side effect", "blocks=...", between(set_attribute)),
    case("bias is changed in place between blocks", "blocks=...", with_a_buffer),
    case("apply was bound to a variable", "write Bound.apply(...)", between(lambda m, x: bound(x))),
    case("detach_ is called between blocks", "without '_'", between(lambda m, x: x.tanh().detach_())),
    case("seeds PyTorch's generator", "blocks=...", between(seed)),
    case("draws from Python's random", "blocks=...", between(draw)),
    case("of size 2*B", "to get None in its place", after(lambda x, y: torch.cat([y, -y]))),
    case("returns 0 numbers with a gradient", "pass the labels", lambda: cut(Between()).step(X)),
    case("forward changes an input tensor in place", "blocks=...", after(lambda x, y: y + x.add_(1))),
    case("in another layer than the one that made it", "copy it first", lambda: cut(InPlace())),
    case("that no module has as an attribute", "register it as a buffer", between(unknown_tensor)),
    case("a Linear that is no submodule of the model", "blocks=...", lambda: cut(Stranger())),
    case("shape of a tensor depends on its elements", "blocks=...", after(lambda x, y: y[x > 0])),
    case("register_hook is called between blocks", "blocks=...", between(backward_in_forward)),
    case("hidden_states would be collected", "model.plain()", collecting),
    case("output tensor compares samples", "get None in its place", after(lambda x, y: y @ y.T)),
    case("output tensor of a batch does not follow", "'per-microbatch'", after(lambda x, y: y.std())),
    case("got 'cuda', and the stages are on cpu", "devices=[...]", move, "cuda"),
    case("denied to replace forward", "functools.wraps", replace_forward),
    case("a set is passed between modules", "", lambda: _Writer._nested(mock.Mock(), {1, 2})),
    case("a set is returned by a module", "", lambda: list(_paths({1, 2}, "r"))),
    case("where PyTorch shows no call of a function", "blocks=...", scripted),
    case("output [1] is a parameter", "read it from the model", lambda: cut(ReturnsParameter())),
    case("got a Linear", "expected layer 0", out_of_order),
]


def enable_gradient_checkpointing(before: bool) -> None:
    class Enables(Between):
        is_gradient_checkpointing = before

        def gradient_checkpointing_enable(self) -> None: ...

        def gradient_checkpointing_disable(self) -> None: ...

    model = cut(Enables())
    if not before:
        model.gradient_checkpointing_enable()


def differ_between_microbatches() -> None:
    model = cut(After(lambda x, y: y if bool((x > 0).all()) else y * 2))
    model(torch.cat([X.abs() + 1, -X.abs() - 1]))


def square_mask() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x[:, 0] * mask

    GPipe(nn.Sequential(Masked(), nn.Identity()), [1, 1], devices=["cpu"] * 2)(
        torch.ones(4, 4, 4), torch.ones(4, 4)
    )


def with_use_cache() -> None:
    cut(Between())(X, use_cache=True)


def call_with_several_numbers() -> None:
    def scale(x: Tensor, y: Tensor, number: int = 2) -> Tensor:
        return y * number

    model = cut(After(scale))
    for number in (2, 3, 4):
        model(X, number=number)


WARNINGS_OF_MODELS: list[Case] = [
    case("the number 4 among the inputs", "gpipe_fast.replicate(torch.tensor(4))", call_with_several_numbers),
    case("use_cache=True becomes use_cache=False", "keeps no cache", with_use_cache),
    case("becomes checkpoint='always'", "gradient checkpointing", enable_gradient_checkpointing, True),
    case(
        "sets its checkpoint='always'", "gradient_checkpointing_enable", enable_gradient_checkpointing, False
    ),
    case("for some micro-batches than for others", "the whole mini-batch", differ_between_microbatches),
    case("input 1 of shape [4, 4]", "gpipe_fast.replicate", square_mask),
]
