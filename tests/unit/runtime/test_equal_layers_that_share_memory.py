"""Random stages of equal layers whose values share memory equal the plain loop.

Every layer takes and returns ``(x, a, b, {"count": integers, "nothing": None, "number": 3})``. The tensors
``a`` and ``b`` often are views of one tensor, of ``x`` or of each other, or the same tensor.
"""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe_fast
from gpipe_fast import GPipe
from gpipe_fast.runtime import equal_layers
from gpipe_fast.torch_private import pytree
from tests import sampling
from tests.reference import SEED, Result, restored, unequal

pytestmark = pytest.mark.usefixtures("one_thread")

# A stage changes copies of its inputs, and other inputs of the same memory would not show the change.
REFUSED = "in place, and the same memory is also stashed or another input"
WIDTH = 8
NUM_CASES = 400
State = tuple[Tensor, Tensor, Tensor, dict[str, Any]]

# Two tensors of shape (n, 4) from one of shape (n, 8).
PAIRS: dict[str, Callable[[Tensor], Any]] = {
    "split": lambda y: y.split(4, -1),
    "unbind": lambda y: y.reshape(-1, 2, 4).unbind(1),
    "unbind of columns": lambda y: y.reshape(-1, 4, 2).unbind(-1),
    "one half twice": lambda y: (y[:, 4:],) * 2,
    "equal halves": lambda y: (y[:, 4:], y[:, 4:]),
    "steps": lambda y: (y[:, 1::2], y[:, ::2]),
    "overlapping slices": lambda y: (y[:, 1:5], y[:, 3:7]),
    "overlapping strides": lambda y: (
        y[:, 1:].as_strided((len(y), 4), (y.stride(0), 2)),
        y[:, 2:].as_strided((len(y), 4), (y.stride(0), 1)),
    ),
    "expanded": lambda y: (y[:, 3:4].expand(-1, 4), y[:, 5:6].expand(-1, 4)),
    "transposed": lambda y: y.reshape(-1, 4, 2).transpose(1, 2).unbind(1),
    "diagonals": lambda y: tuple(
        y[:, start:]
        .as_strided((len(y), 4), (y.stride(0), 1))
        .unsqueeze(1)
        .expand(-1, 4, -1)
        .diagonal(0, 1, 2)
        for start in (1, 3)
    ),
    "windows": lambda y: y.unfold(1, 4, 3).unbind(1),
    "detached half": lambda y: (y[:, 4:].detach(), y[:, 4:]),
    "copies": lambda y: tuple(half.clone() for half in y.split(4, -1)),
    "rolled": lambda y: (y.roll(1, 1)[:, 2:6], y.flip(1)[:, 1:5]),
    "column-major": lambda y: y.t().contiguous()[2:].t().split((4, 2), 1)[:1] * 2,
}


class Base(nn.Module):
    """Parameters in an order other than that of their uses, and some that no forward reads."""

    def __init__(self, pair: str) -> None:
        super().__init__()
        self.pair = PAIRS[pair]
        self.out = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.narrow = nn.Linear(WIDTH // 2, WIDTH, bias=False)
        self.register_buffer("unused_table", torch.randn(3))
        self.register_buffer("table", torch.randn(2 * WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))


class Makes(Base):
    """New views of a new tensor."""

    def forward(self, state: State) -> Any:
        x, a, _, rest = state
        y = self.out(x) + self.narrow(a)
        return (y * self.scale, *self.pair(y), rest)


class MakesOfInput(Base):
    """New views of the layer's own input, which it also passes on."""

    def forward(self, state: State) -> Any:
        x, _, _, rest = state
        return (x, *self.pair(x), rest)


class MakesOfTable(Base):
    """Views of a lookup in a buffer: they take no gradient."""

    def forward(self, state: State) -> Any:
        x, _, _, rest = state
        return (x * self.scale, *self.pair(self.table[rest["count"]]), rest)


class MakesOfParameter(Base):
    def forward(self, state: State) -> Any:
        x, _, b, rest = state
        return (x + self.narrow(b), *self.pair(self.scale[None].expand(len(x), -1) * 1), rest)


class Reads(Base):
    """Reads the views and passes them on unchanged, as blocks do with rotary embeddings."""

    def forward(self, state: State) -> Any:
        x, a, b, rest = state
        q = self.out(x).view(len(x), 2, 4)
        turned = q * b[:, None] + q.flip(-1) * a[:, None]
        return x + turned.flatten(1), a, b, rest


class ReadsViews(Base):
    """Reads views of the views."""

    def forward(self, state: State) -> Any:
        x, a, b, rest = state
        columns = torch.stack([a[:, 1], b.t()[2], b[:, 1:3].sum(1), a[:, 2:].select(1, 1)], 1)
        return x * torch.sigmoid(self.narrow(columns)), a, b, rest


class Swaps(Base):
    """Swaps the views; does not read the parameters of most others."""

    def forward(self, state: State) -> Any:
        x, a, b, rest = state
        return self.out(x) * torch.cat([a, b], 1), b, a, rest


class ReturnsTwice(Base):
    def forward(self, state: State) -> Any:
        x, _, b, rest = state
        return torch.tanh(self.out(x)) + self.narrow(b), b, b, rest


class ReturnsViewOfInput(Base):
    def forward(self, state: State) -> Any:
        x, a, b, rest = state
        return x + self.narrow(a), x[:, 2:6], b, rest


class ReturnsFlat(Base):
    """Views of views, in other orders of dimensions."""

    def forward(self, state: State) -> Any:
        x, a, b, rest = state
        y = torch.cat([b, a], 1)
        return (F.layer_norm(y, (WIDTH,), self.scale) + x, *self.pair(self.out(y)), rest)


class Unread(Base):
    """Reads neither view, nor any parameter but one."""

    def forward(self, state: State) -> Any:
        x, a, b, rest = state
        return x * self.scale, a, b, rest


class Detaches(Base):
    def forward(self, state: State) -> Any:
        x, a, b, rest = state
        return self.out(x) + self.narrow(a).detach(), a.detach(), b, rest


class Draws(Base):
    def __init__(self, pair: str) -> None:
        super().__init__(pair)
        self.dropout = nn.Dropout(0.25)

    def forward(self, state: State) -> Any:
        x, a, b, rest = state
        return x + self.dropout(self.narrow(a)), self.dropout(b), a, rest


class Normalizes(Base):
    """Writes buffers, those of batch norm and one of its own."""

    def __init__(self, pair: str) -> None:
        super().__init__(pair)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("sum", torch.zeros(WIDTH // 2))

    def forward(self, state: State) -> Any:
        x, a, b, rest = state
        with torch.no_grad():
            self.sum += b.sum(0)
        return self.norm(x) + self.narrow(b), a, b, {**rest, "count": rest["count"] + 1}


class ChangesInPlace(Base):
    """Changes a tensor of its own in place, of which others are views."""

    def forward(self, state: State) -> Any:
        x, a, _, rest = state
        y = self.out(x) * 1
        views = self.pair(y)
        y.add_(1)
        return (y + self.narrow(a), *views, rest)


class ChangesX(Base):
    """Changes the output of the layer before in place."""

    def forward(self, state: State) -> Any:
        x, a, b, rest = state
        x += 1
        return self.out(x) + self.narrow(a), a, b, rest


class ChangesView(Base):
    """Changes a view in place, and what shares its memory."""

    def forward(self, state: State) -> Any:
        x, a, b, rest = state
        a.mul_(2)
        return self.out(x) + self.narrow(b), a, b, rest


MAKERS: list[type[Base]] = [Makes, MakesOfInput, MakesOfTable, MakesOfParameter]
WRITERS: list[type[Base]] = [ChangesX, ChangesView]
KINDS = [
    *(*MAKERS, *WRITERS, Reads, ReadsViews, Swaps, ReturnsTwice, ReturnsViewOfInput, ReturnsFlat, Unread),
    *(Detaches, Draws, Normalizes, ChangesInPlace),
]


class Start(nn.Module):
    """Takes a tensor, or views of one, and makes the first state."""

    def forward(self, given: Any) -> Any:
        x, other = given if isinstance(given, tuple) else (given, given)
        count = torch.arange(len(x), device=x.device)
        a, b = other[:, 4:], other[:, :4]
        return x, a, b, {"nothing": None, "count": count, "number": 3}


class Finish(nn.Module):
    def forward(self, state: State) -> Any:
        x, a, b, _ = state
        return x * torch.cat([b, a], 1)


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


# The arguments of a call, from one tensor of shape (n, 16).
INPUTS: dict[str, Callable[[Tensor], Any]] = {
    "one tensor": lambda x: x[:, :WIDTH],
    "twice": lambda x: twice(x[:, :WIDTH]),
    "halves": lambda x: x.split(WIDTH, 1),
    "overlapping": lambda x: (x[:, :WIDTH], x[:, 2 : 2 + WIDTH]),
}
MODES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "train": contextlib.nullcontext,
    "eval": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


class Case:
    """A random stage, and how it is called."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"{sampling.seed()}/{seed}")
        torch.manual_seed(seed)
        kinds = [rng.choice(MAKERS), *rng.sample(KINDS, 2)]
        pairs = [rng.choice(list(PAIRS)) for _ in kinds]
        order = [rng.randrange(3) for _ in range(rng.randint(3, 5))]
        self.layers = nn.Sequential(Start(), *(kinds[i](pairs[i]) for i in order))
        if rng.random() < 0.6:
            self.layers.append(Finish())
        for parameter in self.layers.parameters():
            parameter.requires_grad_(rng.random() < 0.9)
        self.inputs = rng.choice(list(INPUTS))
        count, cut = len(self.layers), rng.randint(1, len(self.layers) - 1)
        self.balances = [[count], rng.choice([[cut, count - cut], [1] * count])]
        self.changes_in_place = not set(WRITERS).isdisjoint(map(type, self.layers))
        self.input_gradient = not self.changes_in_place and rng.random() < 0.5
        self.mode = rng.choices(list(MODES), (3, 1, 1, 1))[0]
        self.checkpoint = rng.choice(["always", "never", 0.5])
        self.used = [rng.random() < 0.75 for _ in range(3)]
        self.chunks = rng.choice([1, 2])
        self.sizes = rng.choices([[4], [4, 6, 10]], (9, 1))[0]
        self.kinds = [(kinds[i].__name__, pairs[i]) for i in order]

    def __str__(self) -> str:
        return str({name: value for name, value in vars(self).items() if name != "layers"})

    def step(self, model: nn.Module, run: Callable[[Any], Any], size: int) -> Result:
        """Runs a call and its backward; returns all that they leave behind."""
        with restored(model):
            x = torch.randn(size, 2 * WIDTH, generator=torch.Generator().manual_seed(size))
            x.requires_grad_(self.input_gradient)
            torch.manual_seed(SEED)
            model.train(self.mode == "train")
            with MODES[self.mode]():
                leaves = pytree.tree_leaves(run(INPUTS[self.inputs](x)))
            outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            assert [leaf for leaf in leaves if not isinstance(leaf, Tensor)] in ([], [None, 3])
            differentiable = [o for o in outputs if o.requires_grad]
            used = [o for o, is_used in zip(differentiable, self.used, strict=False) if is_used]
            used = used or differentiable[:1]
            torch.autograd.backward(used, [torch.linspace(1, 2, o.numel()).view(o.shape) for o in used])
            result: Result = {f"output {i}": o.detach().clone() for i, o in enumerate(outputs)}
            result["input gradient"] = x.grad
            result |= {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
            return result | {n: b.clone() for n, b in model.named_buffers()}


def loop(layers: nn.Sequential, chunks: int) -> Callable[[Any], Any]:
    """Returns a function that runs the layers for one micro-batch after the other."""

    def run(given: Any) -> Any:
        if isinstance(given, Tensor):
            parts = list(given.chunk(chunks))
        elif given[0] is given[1]:
            parts = [twice(part) for part in given[0].chunk(chunks)]
        else:
            parts = list(zip(*(x.chunk(chunks) for x in given), strict=True))
        with gpipe_fast.keyed_rng(layers):
            outputs = [pytree.tree_leaves(layers(part)) for part in parts]
        return [torch.cat(o) if isinstance(o[0], Tensor) else o[0] for o in zip(*outputs, strict=True)]

    return run


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_equal_layers_whose_values_share_memory(seed: int) -> None:
    case = Case(seed)
    plain = copy.deepcopy(case.layers)
    try:
        expected = [case.step(plain, loop(plain, case.chunks), size) for size in case.sizes]
    except RuntimeError as error:
        pytest.skip(f"autograd refuses a change in place: {error}")
    with patch.object(equal_layers, "_MIN_MODULES", 0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for balance in case.balances:
            layers, devices = copy.deepcopy(case.layers), ["cpu"] * len(balance)
            pipe = GPipe(layers, balance, devices=devices, chunks=case.chunks, checkpoint=case.checkpoint)
            for size, wanted in zip(case.sizes, expected, strict=True):
                try:
                    found = case.step(pipe, pipe, size)
                except RuntimeError as error:
                    if not case.changes_in_place or REFUSED not in str(error):
                        raise
                else:
                    if case.changes_in_place and case.mode == "inference":
                        # Copies begin at other addresses, on which the last bits of products depend.
                        torch.testing.assert_close(found, wanted)
                        continue
                    assert unequal(found, wanted) == [], (str(case), balance, size)
