"""Random models and ways to train them: `draw` makes a `Combination` from a seed, plain data with a repr."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from bench.models.gpt import Block
from gpipe_fast import is_checkpointing, is_recomputing, replicate
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.layers.skip import Namespace, pop, skippable, stash
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

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
BACKENDS = ("auto", "eager", "aten")
HOOKS = ("forward", "forward pre", "full backward", "parameter")
OPTIMIZERS = ("SGD", "AdamW")
AUTOCAST = ("off", "bfloat16")
LAYOUTS = ("contiguous", "permuted", "gaps", "unaligned")
LOSSES = ("noise", "squares", "first", "mean", "transposed")
# What is different in one of the steps.
CHANGES = ("nothing", "batch", "length", "checkpoint", "chunks", "eval", "freeze")


@dataclass(frozen=True)
class Combination:
    """One training run; every string is a key of one of the tables here."""

    seed: int
    inputs: str
    layers: tuple[str, ...]
    skips: tuple[tuple[int, int], ...]  # before which of them, from and to
    outputs: str
    balance: tuple[int, ...]
    batch: int
    length: int
    chunks: int
    checkpoint: str
    backend: str
    dtype: str
    autocast: str
    layout: str
    input_gradient: bool
    frozen: float
    hooks: tuple[str, ...]
    training: bool
    grad: bool
    optimizer: str
    loss: str
    accumulate: bool
    steps: int
    change: str
    change_at: int

    @property
    def in_python(self) -> bool:
        """Whether some layer cannot be lowered."""
        return any(name in PYTHON for name in self.layers)

    def build(self) -> Layers:
        """The layers, the same at every call."""
        torch.manual_seed(self.seed)
        between: list[Layers] = [[] for _ in range(len(self.layers) + 1)]
        for first, last in self.skips:
            own = Namespace()
            between[first].append(Stashing().isolate(own))
            between[last].append(Popping().isolate(own))
        inner = itertools.zip_longest(between, (MENU[name]() for name in self.layers), fillvalue=[])
        layers = [
            *INPUTS[self.inputs].layers(),
            *(layer for skips, entry in inner for layer in (*skips, *entry)),
            *OUTPUTS[self.outputs](),
        ]
        chosen = random.Random(self.seed)
        for layer in layers:
            for parameter in layer.to(DTYPES[self.dtype]).parameters():
                parameter.requires_grad_(chosen.random() >= self.frozen)
        return layers


def draw(seed: int) -> Combination:
    """The combination of a seed."""
    r = random.Random(seed)
    inputs = r.choice([*INPUTS, "tensor", "tokens"])
    outputs = r.choice([*OUTPUTS, "tensor", "tensor"])
    layers, num_layers = _layers(r, len(INPUTS[inputs].layers()) + len(OUTPUTS[outputs]()))
    skips = _skips(random.Random(f"skips of {seed}"), len(layers))
    in_python = any(name in PYTHON for name in layers)
    backend = r.choice(["auto", "auto", "eager"] if in_python else ["auto", "auto", "aten", "eager"])
    # Stages that are all lowered take gradients in their outputs' layout alone.
    losses = LOSSES if backend == "eager" or in_python else LOSSES[:3]
    steps = r.randint(3, 4) if in_python else r.randint(2, 3)
    return Combination(
        seed,
        inputs,
        layers,
        skips,
        outputs,
        balance=_balance(r, num_layers + 2 * len(skips)),
        batch=r.randint(1, 13),
        length=r.randint(2, 5),  # batch norm wants two values
        chunks=r.randint(1, 9),
        checkpoint=r.choice(CHECKPOINT_MODES),
        backend=backend,
        # PyTorch cannot add sparse bfloat16.
        dtype=r.choice(["float32", "float64"] if "sparse" in layers else ["float32", "float32", *DTYPES]),
        autocast=r.choice(["off", "off", *AUTOCAST]),
        layout=r.choice(["contiguous", "contiguous", *LAYOUTS]),
        input_gradient=r.random() < 0.5,
        frozen=r.choice([0.0, 0.0, 0.3, 0.8]),
        hooks=tuple(hook for hook in HOOKS if r.random() < 0.15),
        training=r.random() < 0.8,
        grad=r.random() < 0.9,
        optimizer="SGD" if "sparse" in layers else r.choice(OPTIMIZERS),
        loss=r.choice(losses),
        accumulate=r.random() < 0.2,
        steps=steps,
        change=r.choice(["nothing", *CHANGES]),
        change_at=r.randrange(1, steps),
    )


def _layers(r: random.Random, others: int) -> tuple[tuple[str, ...], int]:
    """Names of three to nine layers with the others, at most two of them in Python."""
    wanted, names = r.randint(3, 9) - others, list[str]()
    python = [r.choice([*PYTHON]) for _ in range(r.choice([0, 0, 1, 2]))]
    left = wanted - sum(len(PYTHON[name]()) for name in python)
    while left > 0:
        name = r.choice([*LOWERED])
        if (size := len(LOWERED[name]())) <= left:
            names.append(name)
            left -= size
    for name in python:
        names.insert(r.randint(0, len(names)), name)
    return tuple(names), others + sum(len(MENU[name]()) for name in names)


def _skips(r: random.Random, num_entries: int) -> tuple[tuple[int, int], ...]:
    """None for half of the combinations, else one to three."""
    if r.random() < 0.5 or not num_entries:
        return ()
    gaps = range(num_entries + 1)
    return tuple((min(pair), max(pair)) for pair in (r.sample(gaps, 2) for _ in range(r.randint(1, 3))))


def _balance(r: random.Random, num_layers: int) -> tuple[int, ...]:
    num_stages = r.randint(1, min(4, num_layers))
    ends = [0, *sorted(r.sample(range(1, num_layers), num_stages - 1)), num_layers]
    return tuple(end - begin for begin, end in itertools.pairwise(ends))


def tensor(combination: Combination, generator: torch.Generator, *size: int) -> Tensor:
    """A mini-batch of noise in the combination's dtype and layout."""
    dtype = DTYPES[combination.dtype]

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    batch, length, width = size
    if combination.layout == "permuted":
        return noise(batch, width, length).transpose(1, 2)
    if combination.layout == "gaps":
        return noise(batch, length + 2, width)[:, 1:-1]
    if combination.layout == "unaligned":
        return noise(batch * length * width + 1)[1:].view(batch, length, width)
    return noise(batch, length, width)
