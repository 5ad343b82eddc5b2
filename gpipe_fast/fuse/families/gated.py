"""Gated activations such as SwiGLU and GeGLU, with dropout, and their gradients (kernels/gated.py).

Gate and up are two tensors, or the halves of one tensor, which ``chunk`` or slices select::

    forward   a = dropout(act(gate) * up)
    backward  dgate and dup, or the gradient of the tensor that contains both
              a, recomputed in the same pass
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpipe_fast.fuse.families.norms import draw_of, keep_mask, mask_of
from gpipe_fast.fuse.family import Argument, Case, Numbers, Results
from gpipe_fast.fuse.patterns import BATCH, COLUMNS, LENGTH, SCALE
from gpipe_fast.fuse.spellings import SPELLINGS, Spelling, with_gradients
from gpipe_fast.kernels import gated

aten = torch.ops.aten

_SHAPES = ((BATCH, LENGTH, COLUMNS), (BATCH, COLUMNS))
_FLAGS = (True, False)


def cases(stream: torch.dtype, own: torch.dtype) -> Iterator[Case]:
    """Yields the cases for these dtypes; none for a mix of two, because casts stand around the products."""
    if stream != own:
        return
    for spelling, shape in itertools.product(SPELLINGS, _SHAPES):
        for packing in PACKINGS:
            for dropout in {False, packing is SEPARATE}:
                yield Forward(spelling, packing, own, shape, dropout).case()
                for with_a in _FLAGS:
                    yield Backward(spelling, packing, own, shape, dropout, with_a).case()


@dataclass(frozen=True)
class Packing:
    """Where gate and up are: in two tensors or in the halves of one.

    Attributes:
        name: for reports.
        is_packed: whether one tensor contains both.
        slices: whether slices select the halves, not ``chunk``.
        gate_first: whether the gate is the first half.
    """

    name: str
    is_packed: bool
    slices: bool = False
    gate_first: bool = True

    def gate_and_up(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Returns gate and up, as operators select them."""
        if not self.is_packed:
            gate, up = tensors
            return gate, up
        (z,) = tensors
        first, second = (z[..., :COLUMNS], z[..., COLUMNS:]) if self.slices else z.chunk(2, -1)
        return (first, second) if self.gate_first else (second, first)


SEPARATE = Packing("", False)
PACKINGS = (
    SEPARATE,
    Packing("chunks", True),
    Packing("chunks", True, gate_first=False),
    Packing("slices", True, slices=True),
    Packing("slices", True, slices=True, gate_first=False),
)


@dataclass(frozen=True)
class _Gated:
    spelling: Spelling
    packing: Packing
    dtype: torch.dtype
    shape: tuple[int, ...]
    dropout: bool

    def _name(self, backward: str = "") -> str:
        words = [f"gated {self.spelling.activation}{backward}"] + ["dropout"] * self.dropout
        return ", ".join([*words, *([self.packing.name] if self.packing.name else [])])

    def _gate_and_up_arguments(self) -> tuple[Argument, ...]:
        if self.packing.is_packed:
            return (((*self.shape[:-1], 2 * COLUMNS), self.dtype),)
        return ((self.shape, self.dtype),) * 2

    def _key_argument(self) -> tuple[Argument, ...]:
        return (((3,), torch.int64),) * self.dropout

    def _also(self) -> tuple[Any, ...]:
        packing = self.packing
        split = (aten.slice.Tensor if packing.slices else aten.split.Tensor,) * packing.is_packed
        return split + draw_of(self.dropout)

    def _split(self, arguments: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns gate and up, in one tensor or two, and the remaining arguments."""
        count = 1 if self.packing.is_packed else 2
        return arguments[:count], arguments[count:]

    def _product(self, *tensors: Tensor) -> Tensor:
        gate, up = self.packing.gate_and_up(tensors)
        return self.spelling.function(gate, self.dtype) * up


@dataclass(frozen=True)
class Forward(_Gated):
    """A forward: see the module's docstring."""

    def case(self) -> Case:
        """Returns the case."""
        arguments = self._gate_and_up_arguments() + self._key_argument()
        return Case(
            self._name(), self.pattern, arguments, self.launch, self.spelling.forward, phase=1,
            also=self._also(),
        )  # fmt: skip

    def pattern(self, *arguments: Tensor) -> Results:
        """The gated activation in operators."""
        tensors, key = self._split(arguments)
        a = self._product(*tensors)
        return (a * keep_mask(key[0], self.shape) * SCALE if key else a,)

    def launch(self, numbers: Numbers, *arguments: Tensor) -> Results:
        """The gated activation by a kernel."""
        (z, *up), key = self._split(arguments)
        mask = mask_of(numbers, key[0]) if key else None
        a = gated.launch_forward(
            z, up[0] if up else None, self.spelling.activation, mask, gate_first=self.packing.gate_first
        )
        return (a,)


@dataclass(frozen=True)
class Backward(_Gated):
    """A backward: see the module's docstring. ``with_a``: whether a is a result."""

    with_a: bool

    def case(self) -> Case:
        """Returns the case."""
        name = self._name(" and its backward" if self.with_a else " backward")
        arguments = (*self._gate_and_up_arguments(), (self.shape, self.dtype), *self._key_argument())
        return Case(
            name, self.pattern, arguments, self.launch, self.spelling.backward, phase=0, also=self._also()
        )

    def pattern(self, *arguments: Tensor) -> Results:
        """The gradient in operators."""
        tensors, (g, *key) = self._split(arguments)
        mask = keep_mask(key[0], self.shape) if key else None
        if mask is not None:
            g = aten.native_dropout_backward(g, mask, SCALE)
        a, *gradients = with_gradients(self._product, tensors, g)
        a = a if mask is None else a * mask * SCALE
        return (*gradients, *[a] * self.with_a)

    def launch(self, numbers: Numbers, *arguments: Tensor) -> Results:
        """The gradient by a kernel."""
        (z, *up), (g, *key) = self._split(arguments)
        found = gated.launch_backward(
            z, up[0] if up else None, g, self.spelling.activation, self.with_a,
            mask_of(numbers, key[0]) if key else None, gate_first=self.packing.gate_first,
        )  # fmt: skip
        return tuple(t for t in (found.dz, found.dup, found.a) if t is not None)
