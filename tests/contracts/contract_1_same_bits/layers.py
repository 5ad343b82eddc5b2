"""Layers by name: for random sequences of them, with forms of inputs and outputs; and small models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

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


class Calls(nn.Module):
    """Calls a function with the input and some modules."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.inner)


class DropoutBlock(nn.Module):
    """A GPT block with causal attention and dropout."""

    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return gradient * result * 0.5  # deliberately not the derivative, to show that this backward runs


def _halve_gradient(x: Tensor) -> Tensor:
    x = x * 1
    if x.requires_grad:
        x.register_hook(lambda g: g / 2)
    return x


def _in_place(x: Tensor) -> Tensor:
    x = x * 2
    x.add_(1).clamp_(min=0.1)
    x[:, 0] = 3
    return x


def _tied_model() -> nn.Sequential:
    embedding, head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, DropoutBlock(8), head)


def _frozen() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 5))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


# Small models, each with the shape of a sample; None: six integers below `TOKENS`.
SEQUENCE, INDICES, IMAGE, FEATURES = (9, 8), None, (3, 8, 8), (12,)
MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...] | None]] = {
    "GPT": (
        lambda: nn.Sequential(nn.Embedding(11, 8), DropoutBlock(8), DropoutBlock(8), nn.Linear(8, 11)),
        INDICES,
    ),
    "GPT with its loss": (
        lambda: nn.Sequential(
            nn.Embedding(11, 8),
            DropoutBlock(8),
            nn.Linear(8, 11),
            Calls(lambda x: F.cross_entropy(x.flatten(0, 1), x.detach().flatten(0, 1).argmin(1)).reshape(1)),
        ),
        INDICES,
    ),
    "convolution and batch norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        IMAGE,
    ),
    "group and instance norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.InstanceNorm2d(6, affine=True)),
        IMAGE,
    ),
    "RMS norm": (lambda: nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8), nn.RMSNorm(8)), SEQUENCE),
    "multi-head attention": (
        lambda: nn.Sequential(
            nn.Linear(8, 8),
            Calls(
                lambda x, f: f(x, x, x, need_weights=False)[0],
                nn.MultiheadAttention(8, 2, 0.1, batch_first=True),
            ),
        ),
        SEQUENCE,
    ),
    "transformer encoder layers": (
        lambda: nn.Sequential(
            *(nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True) for _ in range(2))
        ),
        SEQUENCE,
    ),
    "embedding bag": (lambda: nn.Sequential(nn.EmbeddingBag(11, 8), nn.Linear(8, 4)), INDICES),
    "pooling": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.AvgPool2d(2), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
        ),
        IMAGE,
    ),
    "PReLU": (lambda: nn.Sequential(nn.Linear(12, 8), nn.PReLU(8), nn.PReLU()), FEATURES),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(9, 6, 3), nn.Tanh(), nn.Conv1d(6, 4, 3)), SEQUENCE),
    "weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(12, 8)), nn.Tanh(), nn.Linear(8, 2)),
        FEATURES,
    ),
    "spectral norm": (
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(12, 8)), nn.Tanh(), nn.Linear(8, 2)),
        FEATURES,
    ),
    "transposed convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 3, 3, stride=2)),
        IMAGE,
    ),
    "nearest upsampling": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2), nn.Conv2d(4, 2, 3)),
        IMAGE,
    ),
    "custom autograd function": (
        lambda: nn.Sequential(nn.Linear(12, 6), Calls(Exponential.apply), nn.Linear(6, 2)),
        FEATURES,
    ),
    "tensor hook": (
        lambda: nn.Sequential(nn.Linear(12, 6), Calls(_halve_gradient), nn.Linear(6, 2)),
        FEATURES,
    ),
    "nested checkpoint": (
        lambda: nn.Sequential(
            nn.Linear(12, 6),
            Calls(
                lambda x, f: checkpoint(f, x, use_reentrant=False),
                nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)),
            ),
            nn.Linear(6, 2),
        ),
        FEATURES,
    ),
    "frozen parameters": (_frozen, FEATURES),
    "integers between layers": (
        lambda: nn.Sequential(Calls(lambda x: x.flip(1)), Calls(lambda x: (x + 1) % 11), nn.Embedding(11, 8)),
        INDICES,
    ),
    "integer output": (
        lambda: nn.Sequential(nn.Embedding(11, 8), Calls(lambda x: x.argmax(-1))),
        INDICES,
    ),
    "in-place operations": (
        lambda: nn.Sequential(nn.Linear(12, 6), nn.ReLU(inplace=True), Calls(_in_place), nn.Linear(6, 2)),
        FEATURES,
    ),
    "tied parameters": (_tied_model, INDICES),
    "random numbers": (
        lambda: nn.Sequential(
            nn.Linear(12, 6),
            nn.Dropout(0.3),
            Calls(lambda x: x + torch.randn_like(x) * torch.rand(6)),
            nn.Dropout(0.3),
        ),
        FEATURES,
    ),
}


def make_model(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return MODELS[name][0]()
