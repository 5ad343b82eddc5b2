"""The layers of random combinations, and the forms of their inputs and outputs, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from bench.models.gpt import Block
from gpipe_fast import is_checkpointing, is_recomputing, replicate
from gpipe_fast.layers.skip import pop, skippable, stash
from tests.untraceable import WIDTH, FunctionLayer, Hooked, StatefulLayer

# Every menu entry maps a tensor of shape (batch, length, WIDTH) to another one.
TOKENS = 11
Layers = list[nn.Module]


class RunningAverage(nn.Module):
    """Subtracts a running average; every call reads it and then updates it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.average
        if self.training:
            self.average.mul_(0.75).add_(x.detach().mean((0, 1)).to(self.average.dtype), alpha=0.25)
            self.calls += 1
        return y


def channels_first(f: nn.Module, x: Tensor) -> Tensor:
    """Calls a layer whose input has channels before positions."""
    y: Tensor = f(x.transpose(1, 2))
    return y.transpose(1, 2)


def channels_last_convolution(f: nn.Module, x: Tensor) -> Tensor:
    """Convolves images in channels_last memory format."""
    images = x.unsqueeze(1).contiguous(memory_format=torch.channels_last)
    y: Tensor = f(images).relu().mean(1)
    return y


def weight_and_transpose(f: nn.Bilinear, x: Tensor) -> Tensor:
    """Multiplies by a parameter and by its transpose."""
    return torch.sin(x @ f.weight[:, 0] @ f.weight[:, 0].t())


def residual(f: nn.Module, x: Tensor) -> Tensor:
    return x + torch.tanh(f(x))


def tied(f: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = f(torch.tanh(f(x)) + f(x))
    return y


def return_input(f: nn.Module, x: Tensor) -> Tensor:
    return x


def reshaped(f: nn.Module, x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).flatten(-2)


def flipped(f: nn.Module, x: Tensor) -> Tensor:
    """Permutes a view twice, and repeats the first half of the channels."""
    return x.movedim(-1, 0).movedim(0, -1)[:, :, : WIDTH // 2].repeat(1, 1, 2)


def pair_out(f: nn.Module, x: Tensor) -> Any:
    return f(x), x


def list_out(f: nn.Module, x: Tensor) -> Any:
    h = f(x)
    return [h, h, h.transpose(1, 2), x, x[:, :1]]


def pair_in(f: nn.Module, value: Any) -> Tensor:
    a, b = value
    return torch.tanh(a) * b


def list_in(f: nn.Module, value: Any) -> Tensor:
    a, b, c, d, e = value
    return torch.tanh(a * b) + c.transpose(1, 2) - f(d) + e


def in_tuples(f: nn.Module, x: Tensor) -> Any:
    return (f(x), (x, x.argmax(-1), None), 0.5, len(x))


def out_of_tuples(f: nn.Module, value: Any) -> Tensor:
    h, (x, which, nothing), scale, size = value
    assert nothing is None
    return f(h) * scale + x / (size + which.unsqueeze(-1))


def in_lists(f: nn.Module, x: Tensor) -> Any:
    h = f(x)
    return [h, [h.detach(), h > 0, True], h.detach().float().mean()]


def through_lists(f: nn.Module, value: Any) -> Any:
    h, (constant, mask, flag), mean = value
    return [torch.tanh(f(h)), [constant, mask, flag], mean, "more"]


def out_of_lists(f: nn.Module, value: Any) -> Tensor:
    h, (constant, mask, flag), mean, _ = value
    return torch.where(mask, h, f(constant).to(h.dtype)) + mean.to(h.dtype) * flag


def in_dicts(f: nn.Module, x: Tensor) -> Any:
    h = f(x)
    return {"h": h, "mask": h > 0, "rest": {"which": h.argmax(-1), "same": h, "no": None}, "how": "plus"}


def through_dicts(f: nn.Module, value: Any) -> Any:
    return {**value, "h": torch.sigmoid(f(value["h"])), "constant": value["h"].detach()}


def out_of_dicts(f: nn.Module, value: Any) -> Tensor:
    rest = value["rest"]
    h = torch.where(value["mask"], value["h"], rest["same"])
    assert (value["how"], rest["no"]) == ("plus", None)
    return h + rest["which"].unsqueeze(-1) * value["constant"] if "constant" in value else f(h)


# Layers that can be lowered. A stage may end between the layers of one entry.
LOWERED: dict[str, Callable[[], Layers]] = {
    "linear, GELU": lambda: [nn.Linear(WIDTH, WIDTH), nn.GELU()],
    "linear, tanh": lambda: [nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))],
    "in-place ReLU": lambda: [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)],
    "layer norm": lambda: [nn.LayerNorm(WIDTH)],
    "RMS norm": lambda: [nn.RMSNorm(WIDTH)],
    "batch norm": lambda: [FunctionLayer(channels_first, nn.BatchNorm1d(WIDTH))],
    "group norm": lambda: [FunctionLayer(channels_first, nn.GroupNorm(2, WIDTH))],
    "instance norm": lambda: [FunctionLayer(channels_first, nn.InstanceNorm1d(WIDTH, affine=True))],
    "dropout": lambda: [nn.Dropout(0.3)],
    "alpha dropout": lambda: [nn.AlphaDropout(0.1)],
    "attention": lambda: [Block(WIDTH, 2)],
    "encoder layer": lambda: [nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.2, batch_first=True)],
    "convolution": lambda: [FunctionLayer(channels_first, nn.Conv1d(WIDTH, WIDTH, 3, padding=1)), nn.SiLU()],
    "channels_last convolution": lambda: [
        FunctionLayer(channels_last_convolution, nn.Conv2d(1, 2, 3, padding=1))
    ],
    "weight and its transpose": lambda: [
        FunctionLayer(weight_and_transpose, nn.Bilinear(1, WIDTH, WIDTH, bias=False))
    ],
    "residual": lambda: [FunctionLayer(residual)],
    "weight used repeatedly": lambda: [FunctionLayer(tied)],
    "average": lambda: [RunningAverage()],
    "spectral norm": lambda: [parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))],
    "weight norm": lambda: [parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))],
    "returned input": lambda: [FunctionLayer(return_input, nn.Identity())],
    "identity": lambda: [nn.Identity()],
    "view": lambda: [FunctionLayer(reshaped, nn.Identity())],
    "permuted": lambda: [FunctionLayer(flipped)],
    "pair": lambda: [FunctionLayer(pair_out), FunctionLayer(pair_in)],
    "list of five": lambda: [FunctionLayer(list_out), FunctionLayer(list_in)],
    "nested tuples": lambda: [FunctionLayer(in_tuples), FunctionLayer(out_of_tuples)],
    "nested lists": lambda: [
        FunctionLayer(in_lists),
        FunctionLayer(through_lists),
        FunctionLayer(out_of_lists),
    ],
    "nested dicts": lambda: [FunctionLayer(in_dicts), FunctionLayer(out_of_dicts)],
    "nested dicts over three layers": lambda: [
        FunctionLayer(in_dicts),
        FunctionLayer(through_dicts),
        FunctionLayer(out_of_dicts),
    ],
}


def first_output(f: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = f(x)[0]
    return output


class DataDependentBranch(nn.Module):
    """Uses one of two layers, depending on the data; the other may get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.left(x) if float(x.sum()) > 0 else self.right(x).sigmoid()
        return y


def selected(f: nn.Module, x: Tensor) -> Tensor:
    """Applies a layer to a data-dependent number of rows."""
    rows = x[..., 0] > 0
    y = x.clone()
    y[rows] = f(x[rows]).to(y.dtype)
    return y


def embedded(f: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = f((x > 0).long())
    return x * y.sum(-1) + x


def query_phase(f: nn.Module, x: Tensor) -> Tensor:
    assert not (is_checkpointing() and is_recomputing())
    y: Tensor = f(x)
    return y


def dict_with_branch(f: nn.Module, x: Tensor) -> Any:
    """Returns nested values from a layer in Python; the next layer is lowered for them."""
    h = f(x) * (1.0 if float(x.sum()) > 0 else 0.5)
    return {"h": h, "mask": h > 0, "rest": {"which": h.argmax(-1), "same": h, "no": None}, "how": "plus"}


# Layers that run in Python.
RUN_IN_PYTHON: dict[str, Callable[[], Layers]] = {
    "LSTM": lambda: [FunctionLayer(first_output, nn.LSTM(WIDTH, WIDTH, batch_first=True))],
    "GRU": lambda: [FunctionLayer(first_output, nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dropout=0.5))],
    "branch on data": lambda: [DataDependentBranch()],
    "data-dependent index": lambda: [FunctionLayer(selected)],
    "own hooks": lambda: [Hooked()],
    "side effects": lambda: [StatefulLayer()],
    "sparse": lambda: [FunctionLayer(embedded, nn.Embedding(2, WIDTH, sparse=True))],
    "max_norm": lambda: [FunctionLayer(embedded, nn.Embedding(2, WIDTH, max_norm=0.5))],
    "phase query": lambda: [FunctionLayer(query_phase)],
    "averaging batch norm": lambda: [
        FunctionLayer(channels_first, nn.BatchNorm1d(WIDTH, momentum=None, affine=False))
    ],
    "dict from Python": lambda: [FunctionLayer(dict_with_branch), FunctionLayer(out_of_dicts)],
}
MENU = LOWERED | RUN_IN_PYTHON


@skippable(stash=["skip"])
class StashSine(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x.sin())
        return x


@skippable(pop=["skip"])
class PopAndAdd(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("skip")) * x.tanh()


def tuple_to_tensor(f: nn.Module, value: Any) -> Tensor:
    x, (y, tokens, [factor]) = value
    return f(x) + y * factor - tokens.unsqueeze(-1)


def dict_to_tensor(f: nn.Module, value: Any) -> Tensor:
    assert value["none"] is None
    return f(value["x"]) * value["scale"] + value["parts"][0] if value["flag"] else value["x"]


def two_arguments_to_tensor(f: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return f(x) * torch.tanh(y)


def keywords_to_tensor(
    f: nn.Module, x: Tensor, *, bias: Tensor, factor: float = 1.0, flags: Any = ()
) -> Tensor:
    return f(x) * factor + bias if "plus" in flags else f(x) - bias


def with_replicated(f: nn.Module, value: Any, mask: Tensor | None = None) -> Tensor:
    x, weight = value
    h = f(x @ weight)
    return h if mask is None else h * mask


@dataclass(frozen=True)
class InputForm:
    """How a module is called.

    Attributes:
        layers: constructs the layers that turn the arguments into one tensor.
        call: maps ``x``, ``y``, a weight and tokens to the positional and keyword arguments.
    """

    layers: Callable[[], Layers]
    call: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[tuple[Any, ...], dict[str, Any]]]


INPUTS: dict[str, InputForm] = {
    "tensor": InputForm(lambda: [], lambda x, y, w, t: ((x,), {})),
    "tokens": InputForm(lambda: [nn.Embedding(TOKENS, WIDTH)], lambda x, y, w, t: ((t,), {})),
    "tuple": InputForm(
        lambda: [FunctionLayer(tuple_to_tensor)], lambda x, y, w, t: (((x, (y, t, [0.5])),), {})
    ),
    "dict": InputForm(
        lambda: [FunctionLayer(dict_to_tensor)],
        lambda x, y, w, t: (({"x": x, "parts": (y,), "scale": 0.5, "flag": True, "none": None},), {}),
    ),
    "two arguments": InputForm(
        lambda: [FunctionLayer(two_arguments_to_tensor)], lambda x, y, w, t: ((x, y), {})
    ),
    "keyword": InputForm(
        lambda: [FunctionLayer(keywords_to_tensor)],
        lambda x, y, w, t: ((x,), {"bias": y, "factor": 1.5, "flags": ("plus", None)}),
    ),
    "replicated": InputForm(
        lambda: [FunctionLayer(with_replicated)], lambda x, y, w, t: (((x, replicate(w)),), {})
    ),
    "replicated keyword": InputForm(
        lambda: [FunctionLayer(with_replicated)],
        lambda x, y, w, t: (((x, replicate(w)),), {"mask": replicate(w[0] > 0)}),
    ),
}

OUTPUTS: dict[str, Callable[[], Layers]] = {
    "tensor": lambda: [],
    "head": lambda: [nn.Linear(WIDTH, 3)],
    "tuple": lambda: [FunctionLayer(lambda f, x: (f(x), (x.argmax(-1), x.detach()), 3))],
    "dict": lambda: [FunctionLayer(lambda f, x: {"h": f(x), "x": x, "positive": x > 0, "no": None})],
    "repeated input": lambda: [FunctionLayer(lambda f, x: [x, x, f(x).transpose(1, 2)])],
}
