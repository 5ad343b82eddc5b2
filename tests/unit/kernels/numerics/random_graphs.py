"""Random functions of element-wise and reducing operators, of tensors with random shapes and layouts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

COLUMNS = (1, 63, 100, 1000, 4097)
# Few rows: in the interpreter, one operation of one program takes about 0.1 ms, whatever the block size.
ROWS = ((3,), (5,), (2, 3), (1, 4), (2, 2, 2))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Elements of a tensor, at most: an outer sum of a row and a column may be larger than the inputs.
_MAX_ELEMENTS = 1 << 15

_UNARY: Sequence[Callable[[Tensor], Tensor]] = (
    torch.neg, torch.abs, torch.tanh, torch.sigmoid, torch.relu, F.silu, F.gelu, torch.sin, torch.cos,
    torch.erf, torch.square,
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: torch.exp(-torch.abs(x)),
    lambda x: torch.log(torch.abs(x) + 0.5),
    lambda x: torch.rsqrt(x * x + 0.5),
    lambda x: x.clamp(-2.0, 1.5),
    lambda x: 0.5 * x,
    lambda x: x + 3,
    lambda x: 1.0 - x,
    lambda x: torch.tanh(x).pow(3.0),
)  # fmt: skip
_BINARY: Sequence[Callable[[Tensor, Tensor], Tensor]] = (
    torch.add,
    torch.sub,
    torch.maximum,
    lambda a, b: torch.add(a, b, alpha=0.5),
    lambda a, b: a * torch.tanh(b),
    lambda a, b: a / (b.abs() + 1.0),
)


_KINDS = (*["unary"] * 5, *["binary"] * 6, *["reduce"] * 4, *["view"] * 2, *["select"] * 2, "cast")
T = TypeVar("T")


class Choices:
    """Random choices that are the same in each replay; a trace refuses Python's own generators."""

    def __init__(self, seed: int, count: int = 1000) -> None:
        rng = random.Random(seed)
        self._drawn = [rng.random() for _ in range(count)]

    def replay(self) -> Choices:
        """Returns the choices from the first one on."""
        found = Choices(0, 0)
        found._drawn = list(self._drawn)
        return found

    def random(self) -> float:
        """Returns a number from 0 to 1, without 1."""
        return self._drawn.pop()

    def choice(self, items: Sequence[T]) -> T:
        """Returns one of the items."""
        return items[int(self.random() * len(items))]


class RandomFunction:
    """A function that makes the same choices in each call.

    Attributes:
        inputs: its arguments: floating-point tensors, one mask, and one tensor of integers.
    """

    def __init__(self, seed: int) -> None:
        self._choices = Choices(seed)
        with torch.device("cpu"):  # all devices get the same numbers
            self.inputs = _random_inputs(seed)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        rng = self._choices.replay()
        *floats, mask, counts = inputs
        pool, used = list(floats), set()  # type: list[Tensor], set[int]

        def pick(fits: Callable[[Tensor], bool]) -> Tensor | None:
            found = [i for i, t in enumerate(pool) if fits(t)]
            # Later values more often, so that operators follow each other.
            chosen = max(rng.choice(found), rng.choice(found)) if found else None
            if chosen is None:
                return None
            used.add(chosen)
            return pool[chosen]

        for _ in range(rng.choice(range(6, 13))):
            a = pick(lambda t: True)
            assert a is not None
            kind = rng.choice(_KINDS)
            if kind == "unary":
                result = rng.choice(_UNARY)(a)
            elif kind == "binary":
                b = pick(lambda t, a=a: _fits(a, t))  # type: ignore[misc]
                result = rng.choice(_BINARY)(a, a if b is None else b)
            elif kind == "reduce":
                result = _reduced(rng, a)
            elif kind == "view":
                result = _view(rng, a)
            elif kind == "select":
                result = _selected(rng, a, mask, counts)
            else:
                result = a.to(rng.choice(DTYPES))
            pool.append(result)
        results = [t for i, t in enumerate(pool) if i not in used and i >= len(floats)]
        return tuple(results)


def _fits(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors can be broadcast to a shape that is not too large."""
    try:
        return math.prod(torch.broadcast_shapes(a.shape, b.shape)) <= _MAX_ELEMENTS
    except RuntimeError:
        return False


def _random_inputs(seed: int) -> list[Tensor]:
    rng = Choices(seed + 1_000_000)
    rows, cols, dtype = rng.choice(ROWS), rng.choice(COLUMNS), rng.choice(DTYPES)
    shape = (*rows, cols)
    shapes = [shape, shape, (cols,), (*rows, 1), rng.choice([(1, cols), (), shape[1:]])]
    dtypes = [dtype, *(rng.choice((dtype, dtype, torch.float32)) for _ in shapes[1:])]
    generator = torch.Generator().manual_seed(seed)
    floats = [
        _laid_out(rng, torch.randn(s, generator=generator).to(d)) for s, d in zip(shapes, dtypes, strict=True)
    ]
    mask = torch.rand(rng.choice([shape, (cols,), (*rows, 1)]), generator=generator) < 0.7
    counts = torch.randint(0, 4, rng.choice([shape, (cols,)]), generator=generator)
    return [*floats, mask, counts]


def _laid_out(rng: Choices, tensor: Tensor) -> Tensor:
    """Returns a tensor with the same elements in another layout of memory."""
    kind = rng.choice(("contiguous", "contiguous", "permuted", "permuted", "strided", "expanded"))
    if kind == "permuted" and tensor.dim() > 1:
        dims = rng.choice(((-1, -2), (0, 1)))
        return tensor.transpose(*dims).contiguous().transpose(*dims)
    if kind == "strided" and tensor.dim():
        return torch.stack([tensor, torch.full_like(tensor, math.nan)], dim=-1)[..., 0]
    if kind == "expanded" and tensor.dim() > 1:
        return tensor[:1].expand(tensor.shape)
    return tensor


def _reduced(rng: Choices, x: Tensor) -> Tensor:
    if not x.dim():
        return x * 2.0
    last, rows = [x.dim() - 1], list(range(x.dim() - 1))
    dims = rng.choice([last, last, rows or last, [*rows, *last], [rng.choice(range(x.dim()))]])
    keep = rng.random() < 0.6
    dim = dims[0] if len(dims) == 1 else last[0]
    kind = rng.choice(("sum", "mean", "softmax", "log_softmax", "layer_norm", "rms_norm"))
    if kind == "sum":
        # Sums of many numbers would overflow where they are squared.
        return x.sum(dims, keepdim=keep) * (1.0 / math.prod([x.shape[d] for d in dims]))
    if kind == "mean":
        return x.mean(dims, keepdim=keep)
    if kind in ("softmax", "log_softmax"):
        return (torch.softmax if kind == "softmax" else torch.log_softmax)(x, dim)
    if kind == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], eps=0.1)
    return F.rms_norm(x, x.shape[-1:], eps=0.1)


def _view(rng: Choices, x: Tensor) -> Tensor:
    kind = rng.choice(("flatten", "divide", "transpose", "unsqueeze", "expand"))
    if kind == "flatten" and x.dim() > 1:
        return x.flatten(0, 1)
    if kind == "divide" and x.dim() and x.shape[-1] % 4 == 0:
        return x.reshape(*x.shape[:-1], 4, -1)
    if kind == "transpose" and x.dim() > 1:
        return x.transpose(rng.choice(range(x.dim())), rng.choice(range(x.dim())))
    if kind == "expand" and x.dim() and x.shape[0] == 1:
        return x.expand(2, *x.shape[1:])
    return x.unsqueeze(rng.choice(range(x.dim() + 1)))


def _selected(rng: Choices, x: Tensor, mask: Tensor, counts: Tensor) -> Tensor:
    chosen = mask if rng.random() < 0.5 else counts > rng.choice(range(3))
    if rng.random() < 0.3:
        chosen = mask.logical_not()
    if not _fits(x, chosen):
        return torch.relu(x)
    kind = rng.choice(("where", "fill", "multiply", "count"))
    if kind == "where":
        return torch.where(chosen, x, 0.5 * x)
    if kind == "fill":
        return torch.where(chosen, x, -1.0) if x.shape != chosen.shape else x.masked_fill(chosen, -1.0)
    if kind == "count" and _fits(x, counts):
        return x + counts
    return x * chosen
