"""Layers by name, for random sequences of them, with forms of inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from bench.models.gpt import Block
from gpipe_fast import replicate
from gpipe_fast.skip import pop, skippable, stash
from tests.contracts.contract_1_same_bits import unusual_layers
from tests.contracts.contract_1_same_bits.unusual_layers import HALF, Layers, of, to_complex
from tests.untraceable import UNTRACEABLE, WIDTH, FunctionLayer

# Every menu entry maps a tensor of shape (batch, length, WIDTH) to another one.
TOKENS = 11


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


class CustomBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.tanh()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return gradient * result * 0.5  # deliberately not the derivative, to show that this backward runs


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


def return_input(f: nn.Module, x: Tensor) -> Tensor:
    return x


def with_hook(f: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = f(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient / 2)
    return y


def in_place(f: nn.Module, x: Tensor) -> Tensor:
    y = f(x) * 2
    y.add_(1).clamp_(min=0.1)
    y[:, 0] = 3
    return y


def noisy(f: nn.Module, x: Tensor) -> Tensor:
    return x + torch.randn_like(x) * torch.rand(WIDTH, dtype=x.dtype, device=x.device)


def permuted(f: nn.Module, x: Tensor) -> Tensor:
    """Permutes a view twice, and repeats the first half of the channels."""
    return x.movedim(-1, 0).movedim(0, -1)[:, :, : WIDTH // 2].repeat(1, 1, 2)


def list_out(f: nn.Module, x: Tensor) -> Any:
    h = f(x)
    return [h, h, h.transpose(1, 2), x, x[:, :1]]


def list_in(f: nn.Module, value: Any) -> Tensor:
    a, b, c, d, e = value
    return torch.tanh(a * b) + c.transpose(1, 2) - f(d) + e


def in_dicts(f: nn.Module, x: Tensor) -> Any:
    h = f(x)
    rest = {"which": h.argmax(-1), "same": h, "no": None, "size": len(x)}
    return {"h": h, "mask": h > 0, "rest": rest, "how": "plus"}


def in_dicts_with_branch(f: nn.Module, x: Tensor) -> Any:
    """Runs in Python; the next layer is lowered for what it returns."""
    return in_dicts(f, x * (1.0 if float(x.sum()) > 0 else 0.5))


def through_dicts(f: nn.Module, value: Any) -> Any:
    return {**value, "h": torch.sigmoid(f(value["h"])), "constant": value["h"].detach()}


def out_of_dicts(f: nn.Module, value: Any) -> Tensor:
    rest = value["rest"]
    h = torch.where(value["mask"], value["h"], rest["same"]) / rest["size"]
    assert (value["how"], rest["no"]) == ("plus", None)
    return h + rest["which"].unsqueeze(-1) * value["constant"] if "constant" in value else f(h)


def with_module(function: Callable[..., Any], make: Callable[[], nn.Module]) -> Callable[[], Layers]:
    """Returns a constructor of a layer that calls a function with a module."""
    return lambda: [FunctionLayer(function, make())]


# Layers that can be lowered. A stage may end between the layers of one entry.
LOWERED: dict[str, Callable[[], Layers]] = {
    "linear, GELU": lambda: [nn.Linear(WIDTH, WIDTH), nn.GELU()],
    "linear, tanh": lambda: [nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))],
    "in-place ReLU": lambda: [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)],
    "in-place operations": of(in_place),
    "layer norm": lambda: [nn.LayerNorm(WIDTH)],
    "RMS norm": lambda: [nn.RMSNorm(WIDTH)],
    "batch norm": with_module(channels_first, lambda: nn.BatchNorm1d(WIDTH)),
    "group norm": with_module(channels_first, lambda: nn.GroupNorm(2, WIDTH)),
    "instance norm": with_module(channels_first, lambda: nn.InstanceNorm1d(WIDTH, affine=True)),
    "dropout": lambda: [nn.Dropout(0.3)],
    "alpha dropout": lambda: [nn.AlphaDropout(0.1)],
    "random numbers": with_module(noisy, nn.Identity),
    "attention": lambda: [Block(WIDTH, 2)],
    "encoder layer": lambda: [nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.2, batch_first=True)],
    "convolution": lambda: [FunctionLayer(channels_first, nn.Conv1d(WIDTH, WIDTH, 3, padding=1)), nn.SiLU()],
    "channels_last convolution": with_module(
        channels_last_convolution, lambda: nn.Conv2d(1, 2, 3, padding=1)
    ),
    "weight and its transpose": with_module(
        weight_and_transpose, lambda: nn.Bilinear(1, WIDTH, WIDTH, bias=False)
    ),
    "residual": of(lambda f, x: x + torch.tanh(f(x))),
    "weight used repeatedly": of(lambda f, x: f(torch.tanh(f(x)) + f(x))),
    "average": lambda: [RunningAverage()],
    "spectral norm": lambda: [parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))],
    "weight norm": lambda: [parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))],
    "custom backward": of(lambda f, x: CustomBackward.apply(f(x))),
    "tensor hook": of(with_hook),
    "nested checkpoint": with_module(
        lambda f, x: checkpoint(f, x, use_reentrant=False),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
    ),
    "returned input": with_module(return_input, nn.Identity),
    "identity": lambda: [nn.Identity()],
    "view": with_module(lambda f, x: x.unflatten(-1, (2, -1)).flatten(-2), nn.Identity),
    "permuted": of(permuted),
    "pair": of(lambda f, x: (f(x), x), lambda f, pair: torch.tanh(pair[0]) * pair[1]),
    "expanded bias": of(
        lambda f, x: (f(x), f.bias.expand(x.shape)), lambda f, pair: f(pair[0]) * torch.tanh(pair[1])
    ),
    "list of five": of(list_out, list_in),
    "nested dicts over three layers": of(in_dicts, through_dicts, out_of_dicts),
}


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


# Layers that run in Python. `test_python_layers.py` tests those that change their input, or their rounding.
RUN_IN_PYTHON: dict[str, Callable[[], Layers]] = {
    name: lambda make=make: [make()]  # type: ignore[misc]
    for name, make in UNTRACEABLE.items()
    if name not in ("in place", "TorchScript")
}
RUN_IN_PYTHON |= {
    "branch on data": lambda: [DataDependentBranch()],
    "data-dependent shape": of(selected),
    "averaging batch norm": with_module(
        channels_first, lambda: nn.BatchNorm1d(WIDTH, momentum=None, affine=False)
    ),
    "dict from Python": of(in_dicts_with_branch, out_of_dicts),
}
MENU = LOWERED | RUN_IN_PYTHON | unusual_layers.UNUSUAL | unusual_layers.OF_TORCH
IN_PYTHON = RUN_IN_PYTHON.keys() | unusual_layers.IN_PYTHON


@skippable(stash=["skip"])
class StashSine(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x.sin())
        return x


@skippable(pop=["skip"])
class PopAndAdd(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("skip")) * x.tanh()


def swapped() -> Layers:
    """Returns a layer that swaps the first two dimensions."""
    return [FunctionLayer(lambda f, x: x.transpose(0, 1), nn.Identity())]


def tuple_to_tensor(f: nn.Module, value: Any) -> Tensor:
    x, (y, tokens, [factor]) = value
    return f(x) + y * factor - tokens.unsqueeze(-1)


def dict_to_tensor(f: nn.Module, value: Any) -> Tensor:
    assert value["none"] is None
    return f(value["x"]) * value["scale"] + value["parts"][0] if value["flag"] else value["x"]


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
    "tensor": InputForm(of(), lambda x, y, w, t: ((x,), {})),
    "tokens": InputForm(
        lambda: [*of(lambda f, t: (t.flip(1) + 1) % TOKENS)(), nn.Embedding(TOKENS, WIDTH)],
        lambda x, y, w, t: ((t,), {}),
    ),
    "tuple": InputForm(of(tuple_to_tensor), lambda x, y, w, t: (((x, (y, t, [0.5])),), {})),
    "dict": InputForm(
        of(dict_to_tensor),
        lambda x, y, w, t: (({"x": x, "parts": (y,), "scale": 0.5, "flag": True, "none": None},), {}),
    ),
    "two arguments": InputForm(of(lambda f, x, y: f(x) * torch.tanh(y)), lambda x, y, w, t: ((x, y), {})),
    "keyword": InputForm(
        of(keywords_to_tensor),
        lambda x, y, w, t: ((x,), {"bias": y, "factor": 1.5, "flags": ("plus", None)}),
    ),
    "computed": InputForm(of(), lambda x, y, w, t: (((x.sin() * y).mT.contiguous().mT,), {})),
    "views of one tensor": InputForm(
        of(lambda f, p: f(torch.cat([p[1], p[0]], -1))),
        lambda x, y, w, t: ((torch.cat([x, y], -1)[..., 2:].split(HALF, -1)[:2],), {}),
    ),
    "complex": InputForm(
        of(lambda f, z: f(z.real + z.imag.tanh()) * z.conj().imag),
        lambda x, y, w, t: ((torch.complex(x, y).conj(),), {}),
    ),
    "replicated": InputForm(of(with_replicated), lambda x, y, w, t: (((x, replicate(w)),), {})),
    "replicated keyword": InputForm(
        of(with_replicated), lambda x, y, w, t: (((x, replicate(w)),), {"mask": replicate(w[0] > 0)})
    ),
}

OUTPUTS: dict[str, Callable[[], Layers]] = {
    "tensor": of(),
    "head": lambda: [nn.Linear(WIDTH, 3)],
    "tuple": of(lambda f, x: (f(x), (x.argmax(-1), x.detach()), 3)),
    "dict": of(lambda f, x: {"h": f(x), "x": x, "positive": x > 0, "no": None}),
    "repeated input": of(lambda f, x: [x, x, f(x).transpose(1, 2)]),
    "views": of(lambda f, x: [(h := f(x))[..., ::2], h.transpose(1, 2), h[:, :1].expand_as(h)]),
    "complex": of(lambda f, x: [to_complex(f, x).conj(), x]),
}
