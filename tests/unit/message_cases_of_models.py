"""Models that trigger the errors and warnings of `GPipe.from_model`."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe_fast import GPipe, keyed_rng
from gpipe_fast.from_model.layer import _paths, check_sizes
from tests.quantized import Packed
from tests.unit.message_cases import Case, case


class Config:
    """An object that a model has."""

    def __init__(self) -> None:
        self.calls = 0


class Model(nn.Module):
    """Blocks, and a function of the model and its inputs, which by default calls two blocks."""

    def __init__(self, function: Callable[..., Any] | None = None, num_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_blocks))
        self.bias = nn.Parameter(torch.zeros(4))
        self.config = Config()
        self.function = function or two_blocks
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, x, *args, **kwargs)


def two_blocks(model: Any, x: Tensor, **more: Any) -> Any:
    return model.blocks[1](model.blocks[0](x))


def with_parameter(model: Any, x: Tensor) -> Any:
    return two_blocks(model, x), model.bias


def with_function_between(function: Callable[[Any, Tensor], Any]) -> Model:
    return Model(lambda model, x: model.blocks[1](function(model, model.blocks[0](x))))


X = torch.randn(6, 4)


def cut(model: nn.Module, *args: Any, kwargs: Any = None, **options: Any) -> Any:
    options = {"devices": ["cpu", "cpu"], "chunks": 3, **options}
    return GPipe.from_model(model, args or (X,), kwargs, **options)


def cut_after(function: Callable[..., Any], **options: Any) -> Any:
    """Cuts two blocks and a function of the input and their output."""
    return cut(Model(lambda model, x, **more: function(x, two_blocks(model, x), **more)), **options)


def between(function: Callable[[Any, Tensor], Any]) -> Callable[[], object]:
    return lambda: cut(with_function_between(function))


def after(function: Callable[[Tensor, Tensor], Any], **options: Any) -> Callable[[], object]:
    return lambda: cut_after(function, **options)


class Writes(nn.Module):
    """A block that writes to a list, and one that gets a value of an odd kind."""

    def forward(self, x: Tensor, shared: Any) -> Tensor:
        if isinstance(shared, list):
            shared.append(x)
        return x * 1


def shares(make: Callable[[], Any]) -> object:
    """Cuts blocks that get an argument besides the tensor."""

    def forward(model: Any, x: Tensor) -> Tensor:
        shared = make()
        for block in model.blocks:
            x = block(x, shared=shared)
        return x

    model = Model(forward)
    model.blocks = nn.ModuleList([Writes(), Writes()])
    return cut(model)


def ordered(*order: int) -> object:
    """Cuts a model that calls its blocks in this order."""

    def forward(model: Any, x: Tensor) -> Tensor:
        for index in order:
            x = model.blocks[index](x)
        return x

    return cut(Model(forward, 3), blocks="blocks")


class Shared:
    """Something that blocks may share."""


def seed(model: Any, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return x


def decides_by_a_count(model: Any, x: Tensor) -> Tensor:
    rows = x[x[:, 0] > 0]
    return x * 2 if len(rows) > 3 else x


def set_attribute(model: Any, x: Tensor) -> Tensor:
    model.last = 3
    return x


def append(model: Any, x: Tensor) -> Tensor:
    model.seen.append(x)
    return x


def count(model: Any, x: Tensor) -> Tensor:
    model.config.calls += 1
    return x


def decide_by_size() -> None:
    cut_after(lambda x, y: y if len(x) > 1 else -y)(torch.randn(7, 4))


def divided(x: Tensor, y: Tensor) -> Tensor:
    return y.sum() / (x > 0).sum().item()


class Mine(nn.Parameter):
    """A parameter of a class of its own."""


def with_a_class() -> object:
    model = with_function_between(lambda m, x: x * m.bias if isinstance(m.bias, Mine) else x)
    model.bias = Mine(torch.zeros(4))
    return cut(model)


class ReturnsNumber(nn.Module):
    """A block that returns a number that it reads from a tensor."""

    def forward(self, x: Tensor) -> Any:
        return x, int(x.sum() > 0)


def returns_what_it_reads() -> None:
    model = Model(lambda m, x: m.blocks[1](m.blocks[0](x)[0])[0])
    model.blocks = nn.ModuleList([ReturnsNumber(), ReturnsNumber()])
    cut(model)


def alike(model: Any, x: Tensor) -> Tensor:
    return two_blocks(model, model.bias.expand(3, 4)).mean() + x


class Flattens(nn.Linear):
    """A block that reads elements, and returns rows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, 4)) + int(x.flatten()[0] > 100)


def flattens_samples() -> None:
    model = Model()
    model.blocks[1] = Flattens(4, 4)
    cut(model, X[:, None].expand(-1, 3, -1).contiguous())


def add_to_parameter(model: Any, x: Tensor) -> Tensor:
    model.bias.detach().add_(1)
    return x


def with_hooks_of(name: str) -> object:
    model = Model()
    if name == "accelerate":
        model.blocks[1]._hf_hook = object()
        return cut(model)
    model.inner = Model()
    model.forward = lambda x: model.inner(x)
    model.inner.register_forward_hook(print)
    return cut(model, blocks="inner.blocks")


class Collector:
    """A variable as transformers has one."""

    def set(self, outputs: Any) -> None: ...

    def reset(self, token: Any) -> None: ...

    def get(self) -> None: ...


def collecting() -> object:
    collector = Collector()

    def forward(model: Any, x: Tensor) -> Tensor:
        collector.set({"hidden_states": []})
        return two_blocks(model, x)

    module = types.SimpleNamespace(CompileableContextVar=Collector)
    with mock.patch.dict(sys.modules, {"transformers.utils.output_capturing": module}):
        return cut(Model(forward))


def quantized() -> object:
    model = Model()
    model.blocks[0] = torch.ao.nn.quantized.dynamic.Linear(4, 4)
    return cut(model)


def trained_while_quantized() -> object:
    model = Model()
    weight = Tensor._make_subclass(Packed, torch.randn(4, 4), True)
    weight.state = types.SimpleNamespace(scale=torch.ones(4))
    model.blocks[0].weight = weight
    return cut(model)(X)


def change_in_place(model: Any, x: Tensor) -> Tensor:
    """Changes a tensor in place after a block, whose alias an earlier layer made."""
    base = x * 2
    alias = base[:, :2]
    x = model.blocks[0](x)
    base += 1
    return model.blocks[1](x + base) + alias.sum()


def replace_forward() -> None:
    cut(Model()).forward = print


@torch.no_grad()
def with_a_cache_on_two_devices() -> None:
    model, devices = cut(Model()), {torch.device("cpu"), torch.device("cuda:1")}
    with mock.patch.object(type(model), "_own_devices", return_value=devices):
        model(X, use_cache=True)


def selects_before_a_block(model: Any, x: Tensor) -> Tensor:
    """Selects rows, which are used after a block."""
    rows = x[x[:, 0] > 0]
    return two_blocks(model, x) + rows.sum(0)


CONSTANT, LINEAR = torch.ones(4), nn.Linear(4, 4)
NESTED = nn.Sequential(nn.ModuleDict({"0": nn.Linear(4, 4), "1": nn.ReLU()}), nn.ReLU())


def out_of_order() -> None:
    model = cut(Model())
    with keyed_rng(model):
        model.blocks[1](X)


def with_labels(x: Tensor, y: Tensor, labels: Tensor | None = None) -> Tensor:
    return y if labels is None else (y - labels).square().mean()


def with_a_loss(method: str, **arguments: Any) -> object:
    return getattr(cut_after(with_labels), method)(X, **arguments)


def resize_with_gradients() -> None:
    resizable = type("Resizable", (Model,), {"resize_token_embeddings": lambda self, number: None})
    model = cut(resizable())
    model(X).sum().backward()
    model.resize_token_embeddings(9)


def set_placement(name: str, value: Any) -> None:
    setattr(cut(Model()), name, value)


OF_MODELS = [
    case("passes the same inputs to its blocks", "write the layers yourself", lambda: cut(Model(alike), X)),
    case("gets a size from blocks.1", "write the layers yourself", flattens_samples),
    case("of shape (6, 4)", "pad the inputs to equal lengths", check_sizes, X, (6, 3)),
    case("got [1, 1]", "(model.plain(), ..., balance=[1, 1])", set_placement, "balance", [1, 1]),
    case("resize_token_embeddings(9)", "before GPipe.from_model", resize_with_gradients),
    case("step got target=, loss_fn=", "such as labels=", with_a_loss, "step", target=X, loss_fn=torch.sum),
    case("report got loss_fn=", "loss_fn(model(...), target)", with_a_loss, "report", loss_fn=torch.sum),
    case("argument 0 is a list of 2", "model(*tensors)", lambda: cut(Model())([X, X])),
    case("got int", "must be an nn.Module", GPipe.from_model, 3, (X,)),
    case("got list", "pass (x,)", GPipe.from_model, Model(), [X]),
    case("got list", "a dict of keyword arguments", GPipe.from_model, Model(), (X,), [X]),
    case("got 'mean'", "'per-microbatch'", GPipe.from_model, Model(), (X,), loss="mean"),
    case("records a call", "meta device do", GPipe.from_model, Model()),
    case("got int for a Model", "leave it out", lambda: cut(Model()).load_weights({}, quantization_config=4)),
    case("Model is pipelined already", "model.plain()", lambda: cut(cut(Model()))),
    case("blocks.1 has a hook of accelerate", "without device_map", with_hooks_of, "accelerate"),
    case("blocks.0 (Linear) is quantized by torch.ao", "load the model without", quantized),
    case("weight is quantized (Packed)", "call requires_grad_(False)", trained_while_quantized),
    case("inner (Model) contains blocks and has hooks", "on its blocks", with_hooks_of, "inner"),
    case("blocks=[] names no module", "", lambda: cut(Model(), blocks=[])),
    case("no module 'layers'", "its lists are ['blocks']", lambda: cut(Model(), blocks="layers")),
    case("no module of class GELU", "", lambda: cut(Model(), blocks=nn.GELU)),
    case("got int", "names of modules, modules or classes", lambda: cut(Model(), blocks=[3])),
    case("a Linear was passed", "no module of the model", lambda: cut(Model(), blocks=[LINEAR])),
    case("0.0 is inside of block 0", "name one of them", lambda: cut(NESTED, blocks=["0.0", "0"])),
    case("blocks.0 (Linear) is called 2 times", "blocks=...", ordered, 0, 0, 1, 2),
    case("blocks.2 (Linear) is not called", "blocks=...", ordered, 0, 1),
    case("blocks.1 comes before blocks.0", "blocks=...", ordered, 1, 0, 2),
    case("Linear calls no two modules", "blocks=...", lambda: cut(nn.Linear(4, 4))),
    case("adds up to 7", "the 2 blocks, or to 4", lambda: cut(Model(), balance=[3, 4])),
    case("got past_key_values", "model.generate(...)", lambda: cut(Model())(X, past_key_values=object())),
    case("got stages on cpu, cuda:1", "use_cache=False", with_a_cache_on_two_devices),
    case("got [[]]", "a batch dimension", lambda: cut(Model(), torch.tensor(1.0))),
    case("which depends on a Linear", "blocks=...", between(lambda m, x: x if x.sum() > 0 else -x)),
    case("writes to 'shared'", "side channel", shares, list),
    case("a Shared is passed", "as 'shared'; it may", shares, Shared),
    case("writes to seen, a side channel", "blocks=...", between(append)),
    case("sets last, a side effect", "blocks=...", between(set_attribute)),
    case("bias is changed in place between blocks", "blocks=...", between(add_to_parameter)),
    case("may ask for its class, Mine", "inside of a block", with_a_class),
    case("with functions as arguments", "blocks=...", between(lambda m, x: checkpoint(torch.tanh, x))),
    case("no module has is changed in place", "blocks=...", between(lambda m, x: x + CONSTANT.mul_(1))),
    case("a set is passed between modules", "blocks=...", after(lambda x, y: (y, {1}))),
    case("changes an attribute in each call", "blocks=...", between(count)),
    case("forward computes nothing", "blocks=...", lambda: cut(Model(lambda m, x: 3), blocks="blocks")),
    case("decides by the number of samples", "blocks=...", after(lambda x, y: y if len(x) == 2 else -y)),
    case("for another batch size, forward does", "blocks=...", decide_by_size),
    case(
        "read from a tensor at", "loss='per-microbatch'", after(lambda x, y: y.sum() / (x > 0).sum().item())
    ),
    case("block blocks.0 returns a", "blocks=...", returns_what_it_reads),
    case("detach_ is called between blocks", "without '_'", between(lambda m, x: x.tanh().detach_())),
    case("manual_seed", "blocks=...", between(seed)),
    case("torch.vmap is called between", "inside of one", between(lambda m, x: torch.vmap(torch.sin)(x))),
    case("decides by the elements of a tensor", "blocks=...", between(decides_by_a_count)),
    case("draws from Python's random", "blocks=...", between(lambda m, x: x * random.random())),
    case("of size 2*B", "to get None in its place", after(lambda x, y: torch.cat([y, -y]))),
    case("returns 0 numbers with a gradient", "pass the labels", lambda: cut(Model()).step(X)),
    case("forward changes an input tensor in place", "blocks=...", after(lambda x, y: y + x.add_(1))),
    case("in another layer than the one that made it", "copy it first", lambda: cut(Model(change_in_place))),
    case("that no module has as an attribute", "register it as a buffer", between(lambda m, x: x + CONSTANT)),
    case("has a size that depends on elements", "blocks=...", after(lambda x, y: y[x > 0])),
    case("whose size depends on elements", "sum() / mask.sum()", after(lambda x, y: y[x > 0].mean())),
    case("size that depends on the elements", "blocks=...", after(lambda x, y: y * x[x > 0].numel())),
    case("and another layer uses it", "compute with masks", lambda: cut(Model(selects_before_a_block))),
    case("hidden_states would be collected", "model.plain()", collecting),
    case("output tensor compares samples", "get None in its place", after(lambda x, y: y @ y.T)),
    case("output tensor of a batch does not follow", "'per-microbatch'", after(lambda x, y: y.std())),
    case(
        "it changes a tensor in place",
        "'per-microbatch'",
        after(lambda x, y: nn.functional.relu(y, True).mean()),
    ),
    case("as many for each sample", "", after(lambda x, y: y.sum() * torch.rand(len(x), len(x)).sum())),
    case("got 'cuda', and the stages are on cpu", "devices=[...]", lambda: cut(Model()).cuda()),
    case("denied to replace forward", "functools.wraps", replace_forward),
    case("a set is returned by a module", "", lambda: list(_paths({1, 2}, "r"))),
    case("output [1] is a parameter", "read it from the model", lambda: cut(Model(with_parameter))),
    case("got a Linear", "expected layer 0", out_of_order),
]


def enable_gradient_checkpointing(before: bool) -> None:
    enabling = type(
        "Enables",
        (Model,),
        {
            "gradient_checkpointing": before,
            "gradient_checkpointing_enable": lambda self: None,
            "gradient_checkpointing_disable": lambda self: None,
        },
    )
    model = cut(enabling())
    if not before:
        model.gradient_checkpointing_enable()


def differ_between_microbatches() -> None:
    model = cut_after(lambda x, y: y if bool((x > 0).all()) else y * 2)
    model(torch.cat([X.abs() + 1, -X.abs() - 1]))


class AppliesMask(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x[:, 0] * mask


def square_mask() -> None:
    layers = nn.Sequential(AppliesMask(), nn.Identity())
    GPipe(layers, [1, 1], devices=["cpu"] * 2)(torch.ones(4, 4, 4), torch.ones(4, 4))


def call_with_several_numbers() -> None:
    model = cut_after(lambda x, y, number=2: y * number)
    for number in (2, 3, 4):
        model(X, number=number)


ENABLE = enable_gradient_checkpointing
WARNINGS_OF_MODELS: list[Case] = [
    case("the number 4 among the inputs", "gpipe_fast.replicate(torch.tensor(4))", call_with_several_numbers),
    case("use_cache=True becomes use_cache=False", "keeps no", lambda: cut(Model())(X, use_cache=True)),
    case("becomes checkpoint='always'", "gradient checkpointing", ENABLE, True),
    case("sets its checkpoint='always'", "gradient_checkpointing_enable", ENABLE, False),
    case("for some micro-batches than for others", "the whole mini-batch", differ_between_microbatches),
    case("input 1 of shape [4, 4]", "gpipe_fast.replicate", square_mask),
]
