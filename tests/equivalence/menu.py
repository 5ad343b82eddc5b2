"""The layers that random combinations are made of, and the ways to call them, by name."""

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
from tests.untraceable import WIDTH, Counting, Hooked, Of

# Between entries of the menu goes a tensor of shape (batch, length, WIDTH).
TOKENS = 11
Layers = list[nn.Module]


class Average(nn.Module):
    """Subtracts a running average, which is read and then written in every call."""

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


def across(f: nn.Module, x: Tensor) -> Tensor:
    """A layer that takes channels before positions."""
    y: Tensor = f(x.transpose(1, 2))
    return y.transpose(1, 2)


def planes(f: nn.Module, x: Tensor) -> Tensor:
    """A convolution of images whose channels come last."""
    images = x.unsqueeze(1).contiguous(memory_format=torch.channels_last)
    y: Tensor = f(images).relu().mean(1)
    return y


def product(f: nn.Bilinear, x: Tensor) -> Tensor:
    """By a parameter itself, and by its transpose."""
    return torch.sin(x @ f.weight[:, 0] @ f.weight[:, 0].t())


def residual(f: nn.Module, x: Tensor) -> Tensor:
    return x + torch.tanh(f(x))


def tied(f: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = f(torch.tanh(f(x)) + f(x))
    return y


def itself(f: nn.Module, x: Tensor) -> Tensor:
    return x


def view(f: nn.Module, x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).flatten(-2)


def flipped(f: nn.Module, x: Tensor) -> Tensor:
    """A view in another order: the first of the channels last."""
    return x.movedim(-1, 0).movedim(0, -1)[:, :, : WIDTH // 2].repeat(1, 1, 2)


def twice(f: nn.Module, x: Tensor) -> Any:
    return f(x), x


def thrice(f: nn.Module, x: Tensor) -> Any:
    h = f(x)
    return [h, h, h.transpose(1, 2), x, x[:, :1]]


def once(f: nn.Module, value: Any) -> Tensor:
    a, b = value
    return torch.tanh(a) * b


def joined(f: nn.Module, value: Any) -> Tensor:
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


# What can be lowered. Some entries are several layers, between which a stage may end.
LOWERED: dict[str, Callable[[], Layers]] = {
    "linear, GELU": lambda: [nn.Linear(WIDTH, WIDTH), nn.GELU()],
    "linear, tanh": lambda: [nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))],
    "in-place ReLU": lambda: [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)],
    "layer norm": lambda: [nn.LayerNorm(WIDTH)],
    "RMS norm": lambda: [nn.RMSNorm(WIDTH)],
    "batch norm": lambda: [Of(across, nn.BatchNorm1d(WIDTH))],
    "group norm": lambda: [Of(across, nn.GroupNorm(2, WIDTH))],
    "instance norm": lambda: [Of(across, nn.InstanceNorm1d(WIDTH, affine=True))],
    "dropout": lambda: [nn.Dropout(0.3)],
    "alpha dropout": lambda: [nn.AlphaDropout(0.1)],
    "attention": lambda: [Block(WIDTH, 2)],
    "encoder layer": lambda: [nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.2, batch_first=True)],
    "convolution": lambda: [Of(across, nn.Conv1d(WIDTH, WIDTH, 3, padding=1)), nn.SiLU()],
    "planes": lambda: [Of(planes, nn.Conv2d(1, 2, 3, padding=1))],
    "product": lambda: [Of(product, nn.Bilinear(1, WIDTH, WIDTH, bias=False))],
    "residual": lambda: [Of(residual)],
    "tied within": lambda: [Of(tied)],
    "average": lambda: [Average()],
    "spectral norm": lambda: [parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))],
    "weight norm": lambda: [parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))],
    "itself": lambda: [Of(itself, nn.Identity())],
    "identity": lambda: [nn.Identity()],
    "view": lambda: [Of(view, nn.Identity())],
    "permuted": lambda: [Of(flipped)],
    "twice": lambda: [Of(twice), Of(once)],
    "thrice": lambda: [Of(thrice), Of(joined)],
    "tuples": lambda: [Of(in_tuples), Of(out_of_tuples)],
    "lists": lambda: [Of(in_lists), Of(through_lists), Of(out_of_lists)],
    "dicts": lambda: [Of(in_dicts), Of(out_of_dicts)],
    "long dicts": lambda: [Of(in_dicts), Of(through_dicts), Of(out_of_dicts)],
}


def recurrent(f: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = f(x)[0]
    return output


class Branch(nn.Module):
    """Uses one of two layers, as the data say; the other one may get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.left(x) if float(x.sum()) > 0 else self.right(x).sigmoid()
        return y


def selected(f: nn.Module, x: Tensor) -> Tensor:
    """As many rows as are positive, scattered back."""
    rows = x[..., 0] > 0
    y = x.clone()
    y[rows] = f(x[rows]).to(y.dtype)
    return y


def embedded(f: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = f((x > 0).long())
    return x * y.sum(-1) + x


def asking(f: nn.Module, x: Tensor) -> Tensor:
    assert not (is_checkpointing() and is_recomputing())
    y: Tensor = f(x)
    return y


def listed(f: nn.Module, x: Tensor) -> Any:
    """Values that the next layer is lowered for, of a layer in Python."""
    h = f(x) * (1.0 if float(x.sum()) > 0 else 0.5)
    return {"h": h, "mask": h > 0, "rest": {"which": h.argmax(-1), "same": h, "no": None}, "how": "plus"}


# What runs in Python.
PYTHON: dict[str, Callable[[], Layers]] = {
    "LSTM": lambda: [Of(recurrent, nn.LSTM(WIDTH, WIDTH, batch_first=True))],
    "GRU": lambda: [Of(recurrent, nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dropout=0.5))],
    "branch on data": lambda: [Branch()],
    "data-dependent index": lambda: [Of(selected)],
    "own hooks": lambda: [Hooked()],
    "side effects": lambda: [Counting()],
    "sparse": lambda: [Of(embedded, nn.Embedding(2, WIDTH, sparse=True))],
    "max_norm": lambda: [Of(embedded, nn.Embedding(2, WIDTH, max_norm=0.5))],
    "asks for the phase": lambda: [Of(asking)],
    "averaging batch norm": lambda: [Of(across, nn.BatchNorm1d(WIDTH, momentum=None, affine=False))],
    "dict from Python": lambda: [Of(listed), Of(out_of_dicts)],
}
MENU = LOWERED | PYTHON


@skippable(stash=["skip"])
class Stashing(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x.sin())
        return x


@skippable(pop=["skip"])
class Popping(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("skip")) * x.tanh()


def from_tuple(f: nn.Module, value: Any) -> Tensor:
    x, (y, tokens, [factor]) = value
    return f(x) + y * factor - tokens.unsqueeze(-1)


def from_dict(f: nn.Module, value: Any) -> Tensor:
    assert value["none"] is None
    return f(value["x"]) * value["scale"] + value["parts"][0] if value["flag"] else value["x"]


def two_arguments(f: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return f(x) * torch.tanh(y)


def keywords(f: nn.Module, x: Tensor, *, bias: Tensor, factor: float = 1.0, flags: Any = ()) -> Tensor:
    return f(x) * factor + bias if "plus" in flags else f(x) - bias


def with_whole(f: nn.Module, value: Any, mask: Tensor | None = None) -> Tensor:
    x, weight = value
    h = f(x @ weight)
    return h if mask is None else h * mask


@dataclass(frozen=True)
class Form:
    """How a module is called: its first layers, and from ``x``, ``y``, a weight and tokens its arguments."""

    layers: Callable[[], Layers]
    call: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[tuple[Any, ...], dict[str, Any]]]


INPUTS: dict[str, Form] = {
    "tensor": Form(lambda: [], lambda x, y, w, t: ((x,), {})),
    "tokens": Form(lambda: [nn.Embedding(TOKENS, WIDTH)], lambda x, y, w, t: ((t,), {})),
    "tuple": Form(lambda: [Of(from_tuple)], lambda x, y, w, t: (((x, (y, t, [0.5])),), {})),
    "dict": Form(
        lambda: [Of(from_dict)],
        lambda x, y, w, t: (({"x": x, "parts": (y,), "scale": 0.5, "flag": True, "none": None},), {}),
    ),
    "two arguments": Form(lambda: [Of(two_arguments)], lambda x, y, w, t: ((x, y), {})),
    "keyword": Form(
        lambda: [Of(keywords)],
        lambda x, y, w, t: ((x,), {"bias": y, "factor": 1.5, "flags": ("plus", None)}),
    ),
    "replicated": Form(lambda: [Of(with_whole)], lambda x, y, w, t: (((x, replicate(w)),), {})),
    "replicated keyword": Form(
        lambda: [Of(with_whole)],
        lambda x, y, w, t: (((x, replicate(w)),), {"mask": replicate(w[0] > 0)}),
    ),
}

OUTPUTS: dict[str, Callable[[], Layers]] = {
    "tensor": lambda: [],
    "head": lambda: [nn.Linear(WIDTH, 3)],
    "tuple": lambda: [Of(lambda f, x: (f(x), (x.argmax(-1), x.detach()), 3))],
    "dict": lambda: [Of(lambda f, x: {"h": f(x), "x": x, "positive": x > 0, "no": None})],
    "twice": lambda: [Of(lambda f, x: [x, x, f(x).transpose(1, 2)])],
}
