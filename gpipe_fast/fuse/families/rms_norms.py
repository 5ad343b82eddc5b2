"""RMSNorm with the addition of a residual and casts, and its gradients (kernels/norms.py).

RMSNorm has three spellings: `nn.RMSNorm` is one operator on a GPU, or several if input and weight have
different dtypes; transformers' modules are spelled out. With a residual stream of dtype S, and linear layers
of dtype L::

    forward   x = residual + h                   S, from h in L
              y = rms_norm(x)                    S, cast to L if they differ
    backward  total = g_sum + dx                 S, from g in S or L
              dh = total                         L if they differ: the gradient of h

Patterns let autograd differentiate the norm, because what it computes, and in which order it adds g_sum,
depends on the spelling, on dtypes and on PyTorch's version. Norms of queries and keys have a dimension for
heads.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.fuse.families.norms import check_columns
from gpipe_fast.fuse.family import Argument, Case, Numbers, Results
from gpipe_fast.fuse.patterns import BATCH, COLUMNS, EPS, HEADS, LENGTH
from gpipe_fast.kernels import norms

aten = torch.ops.aten

_FLAT, _SEQUENCES, _HEADS = (BATCH, COLUMNS), (BATCH, LENGTH, COLUMNS), (BATCH, LENGTH, HEADS, COLUMNS)


def _transformers(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def _torch(x: Tensor, weight: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch recommends to use one dtype
        return F.rms_norm(x, [COLUMNS], weight, EPS)


def _torch_autocast(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.to(weight.dtype), [COLUMNS], weight, EPS)


@dataclass(frozen=True)
class Spelling:
    """How a norm is computed: with which operators, of which the anchor is one, and with which dtypes.

    Attributes:
        norm: computes the norm from x and the weight.
        anchor: an operator that few graphs have.
        x: dtype of the input.
        weight: dtype of the weight.
        y: dtype of the result.
    """

    norm: Callable[[Tensor, Tensor], Tensor]
    anchor: Any
    x: torch.dtype
    weight: torch.dtype
    y: torch.dtype


def cases(stream: torch.dtype, own: torch.dtype) -> Iterator[Case]:
    """Yields the cases for a residual stream and for linear layers of these dtypes."""
    spelled, fused = aten.rsqrt.default, aten._fused_rms_norm.default
    yield from _cases_of(Spelling(_transformers, spelled, stream, stream, stream), own)
    yield from _cases_of(Spelling(_torch, fused, stream, stream, stream), own)
    if stream != own:
        for spelling in (
            Spelling(_transformers, spelled, own, stream, stream),
            Spelling(_torch, aten.add.Scalar, own, stream, own),
            Spelling(_torch_autocast, fused, own, stream, stream),
        ):
            yield from _cases_of_products(spelling)


def _cases_of(spelling: Spelling, own: torch.dtype) -> Iterator[Case]:
    """Yields the cases of norms of the residual stream, and of those that stand elsewhere in one dtype."""
    mixed = spelling.x != own
    for trained, residual, low, cast_g in itertools.product((True, False), repeat=4):
        if (mixed or not (low or cast_g)) and (residual or not low):
            yield Backward(spelling, own, _SEQUENCES, residual, low, cast_g, trained).case()
    for residual, cast in itertools.product((True, False), repeat=2):
        if mixed >= cast:
            yield Forward(spelling, own, _SEQUENCES, residual, cast).case()
            if residual:
                yield Forward(spelling, own, _SEQUENCES, residual, cast, with_sum=True).case()
    yield Backward(spelling, own, _SEQUENCES, cast_g=mixed, with_y=True).case()
    if not mixed:
        for shape in (_FLAT, _HEADS):
            yield Backward(spelling, own, shape).case()
            yield Forward(spelling, own, shape).case()


def _cases_of_products(spelling: Spelling) -> Iterator[Case]:
    """Yields the cases of norms of products, which have another dtype than the weight under autocast."""
    for shape in (_SEQUENCES, _HEADS):
        yield Backward(spelling, spelling.x, shape).case()
        yield Forward(spelling, spelling.x, shape).case()


def _eps(numbers: Numbers) -> float:
    """Returns the graph's eps; PyTorch's default is that of the arithmetic, in fp32."""
    eps: float | None = numbers["eps"]
    return torch.finfo(torch.float32).eps if eps is None else eps


@dataclass(frozen=True)
class Forward:
    """A forward: see the module's docstring."""

    spelling: Spelling
    own: torch.dtype
    shape: tuple[int, ...]
    residual: bool = False
    cast: bool = False
    with_sum: bool = False

    def case(self) -> Case:
        """Returns the case."""
        words = ["add"] * self.residual + ["RMS norm"] + ["cast"] * self.cast
        return Case(
            ", ".join(words), self.pattern, self._arguments(), self.launch, self.spelling.anchor, phase=1
        )

    def _arguments(self) -> tuple[Argument, ...]:
        x = (self.shape, self.spelling.x)
        inputs = [(self.shape, self.own), x] if self.residual else [x]
        return (*inputs, ((COLUMNS,), self.spelling.weight))

    def pattern(self, h: Tensor, *rest: Tensor) -> Results:
        """Computes the results with PyTorch's operators."""
        *residual, weight = rest
        x = residual[0] + h if residual else h
        y = self.spelling.norm(x, weight)
        return (y.to(self.own) if self.cast else y, *[x] * self.with_sum)

    def launch(self, numbers: Numbers, h: Tensor, *rest: Tensor) -> Results:
        """Computes the results with kernels."""
        check_columns(h)
        *residual, weight = rest
        found = norms.launch_forward(
            h, residual[0] if residual else None, weight, None, _eps(numbers), "rms", None,
            y_dtype=self.own if self.cast else self.spelling.y, sum_dtype=self.spelling.x,
            with_sum=self.with_sum,
        )  # fmt: skip
        return tuple(t for t in (found.y, found.total) if t is not None)


@dataclass(frozen=True)
class Backward:
    """A backward: see the module's docstring."""

    spelling: Spelling
    own: torch.dtype
    shape: tuple[int, ...]
    g_sum: bool = False
    low: bool = False
    cast_g: bool = False
    trained: bool = True
    with_y: bool = False

    def case(self) -> Case:
        """Returns the case."""
        words = ["RMS norm"] * self.with_y + ["RMS norm backward"] + ["add"] * self.g_sum
        words += ["cast"] * self.low
        return Case(
            ", ".join(words), self.pattern, self._arguments(), self.launch, self.spelling.anchor, phase=0
        )

    def _arguments(self) -> tuple[Argument, ...]:
        x = (self.shape, self.spelling.x)
        g = (self.shape, self.own if self.cast_g else self.spelling.y)
        return (g, x, ((COLUMNS,), self.spelling.weight), *[x] * self.g_sum)

    def pattern(self, g: Tensor, x: Tensor, weight: Tensor, *g_sum: Tensor) -> Results:
        """Computes the results with PyTorch's operators."""
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_(self.trained)
            s = x.view(x.shape)  # the sum of autograd's terms begins with g_sum, as after further uses of x
            y = self.spelling.norm(s, weight)
            y = y.to(self.own) if self.cast_g else y
            inputs = (x, weight) if self.trained else (x,)
            total, *dweight = torch.autograd.grad((*[s] * self.g_sum, y), inputs, (*g_sum, g))
        low = [total.to(self.own)] * self.low
        return (total, *dweight, *low, *[y.detach()] * self.with_y)

    def launch(self, numbers: Numbers, g: Tensor, x: Tensor, weight: Tensor, *g_sum: Tensor) -> Results:
        """Computes the results with kernels."""
        check_columns(x)
        found = norms.launch_backward(
            x, None, weight, None, g, g_sum[0] if g_sum else None, _eps(numbers), "rms", self.with_y, None,
            y_dtype=self.own if self.cast_g else self.spelling.y, dx_dtype=self.spelling.x,
            dh_dtype=self.own if self.low else None, with_dweight=self.trained,
        )  # fmt: skip
        return tuple(t for t in (found.dx, found.dweight, found.dh, found.y) if t is not None)
