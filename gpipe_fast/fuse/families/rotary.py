"""Rotary position embedding as transformers spells it, and its gradient (kernels/rotate_half.py).

Tables have dtype S, and queries and keys, which are products of linear layers, dtype L::

    forward   y = x * cos + rotate_half(x) * sin     S, cast to L for attention if they differ
    backward  dx                                     L, and its copy for the gradient of the linear layer

The copy is the transpose of heads and positions, made contiguous; the kernel writes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpipe_fast.fuse.family import FORWARDS, GRADIENTS, Argument, Case, Numbers, Results
from gpipe_fast.fuse.patterns import BATCH, HALF, HEAD, HEADS, KEY_HEADS, LENGTH
from gpipe_fast.kernels.rotate_half import launch_rotate_half

aten = torch.ops.aten


def cases(stream: torch.dtype, own: torch.dtype) -> Iterator[Case]:
    """Yields the cases for tables, and for queries and keys of these dtypes."""
    casts = (False,) if stream == own else (True, False)
    heads = ((HEADS, KEY_HEADS), (HEADS,))
    for of_x, cast, table_batch in itertools.product(heads, casts, (1, BATCH)):
        yield Rotary(stream, own, of_x, cast, table_batch).case()
        for copy in (True, False):
            yield Gradient(stream, own, of_x, cast, table_batch, copy).case()


def _rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., HALF:], x[..., :HALF]), dim=-1)


@dataclass(frozen=True)
class Rotary:
    """A forward: see the module's docstring.

    Attributes:
        stream: dtype of the tables.
        own: dtype of queries and keys.
        heads: how many heads each rotated tensor has.
        cast: whether results are cast.
        table_batch: the size of the tables' first dimension.
    """

    stream: torch.dtype
    own: torch.dtype
    heads: tuple[int, ...]
    cast: bool
    table_batch: int

    def case(self) -> Case:
        """Returns the case."""
        words = ["rotary"] + ["cast"] * self.cast
        return Case(
            ", ".join(words), self.pattern, self._arguments(), self.launch, aten.neg.default, phase=FORWARDS
        )

    def _arguments(self) -> tuple[Argument, ...]:
        table = ((self.table_batch, 1, LENGTH, HEAD), self.stream)
        return (table, table, *(((BATCH, h, LENGTH, HEAD), self.own) for h in self.heads))

    def pattern(self, cos: Tensor, sin: Tensor, *inputs: Tensor) -> Results:
        """Computes the results with PyTorch's operators."""
        results = (x * cos + _rotate_half(x) * sin for x in inputs)
        return tuple(y.to(self.own) if self.cast else y for y in results)

    def launch(self, numbers: Numbers, cos: Tensor, sin: Tensor, *inputs: Tensor) -> Results:
        """Computes the results with kernels."""
        return _launch(cos, sin, inputs, False, self.own if self.cast else self.stream)


@dataclass(frozen=True)
class Gradient:
    """A gradient: see the module's docstring, and `Rotary` for the attributes.

    Attributes:
        copy: whether results are the contiguous copies.
    """

    stream: torch.dtype
    own: torch.dtype
    heads: tuple[int, ...]
    cast: bool
    table_batch: int
    copy: bool

    def case(self) -> Case:
        """Returns the case."""
        words = ["rotary backward"] + ["copy"] * self.copy
        return Case(
            ", ".join(words), self.pattern, self._arguments(), self.launch,
            aten.slice_backward.default, phase=GRADIENTS,
        )  # fmt: skip

    def _arguments(self) -> tuple[Argument, ...]:
        table = ((self.table_batch, 1, LENGTH, HEAD), self.stream)
        own = self.own if self.cast else self.stream
        return (table, table, *(((BATCH, h, LENGTH, HEAD), own) for h in self.heads))

    def pattern(self, cos: Tensor, sin: Tensor, *gradients: Tensor) -> Results:
        """Computes the results with PyTorch's operators."""
        with torch.enable_grad():
            inputs = tuple(torch.empty_like(g, dtype=self.own).requires_grad_() for g in gradients)
            forward = Rotary(self.stream, self.own, self.heads, self.cast, self.table_batch)
            found = torch.autograd.grad(forward.pattern(cos, sin, *inputs), inputs, gradients)
        if not self.copy:
            return found
        return tuple(dx.transpose(1, 2).clone(memory_format=torch.contiguous_format) for dx in found)

    def launch(self, numbers: Numbers, cos: Tensor, sin: Tensor, *gradients: Tensor) -> Results:
        """Computes the results with kernels."""
        found = _launch(cos, sin, gradients, True, self.own, positions_first=self.copy)
        return tuple(dx.transpose(1, 2) for dx in found) if self.copy else found


def _launch(
    cos: Tensor, sin: Tensor, inputs: tuple[Tensor, ...], inverse: bool, dtype: torch.dtype,
    positions_first: bool = False,
) -> Results:  # fmt: skip
    q, *k = inputs
    cos, sin = cos.squeeze(1), sin.squeeze(1)
    found = launch_rotate_half(
        q, k[0] if k else None, cos, sin, inverse,
        q_dtype=dtype, k_dtype=dtype, positions_first=positions_first,
    )  # fmt: skip
    return tuple(t for t in found if t is not None)
