"""Activations with dropout and casts after them, and their gradients (kernels/activations.py).

With an activation ``act`` of a linear layer's output z of dtype L, and powers in dtype S::

    forward   a = dropout(act(z))                L, cast from S where a power made it S
    backward  dz = dropout's gradient of g, times act'(z)
              a                                  recomputed in the same pass
              sum of dz over rows                L, the bias gradient of the linear layer that made z

An activation that is one operator is left alone where nothing else is fused with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpipe_fast.fuse.families.norms import draw_of, keep_mask, mask_of
from gpipe_fast.fuse.family import Argument, Case, Numbers, Results
from gpipe_fast.fuse.launchers import CannotLaunch
from gpipe_fast.fuse.patterns import BATCH, COLUMNS, HEADS, LENGTH, SCALE
from gpipe_fast.fuse.spellings import RELU, SPELLINGS, Spelling, with_gradients
from gpipe_fast.kernels import activations

aten = torch.ops.aten

_SHAPES = ((BATCH, LENGTH, COLUMNS), (BATCH, COLUMNS))
_IMAGES = (BATCH, HEADS, LENGTH, COLUMNS)
_FLAGS = (True, False)
_KEY = ((3,), torch.int64)
# Columns of the matrix as which the elements of images are processed.
_MIN_COLUMNS, _MAX_COLUMNS = 64, 512


def cases(stream: torch.dtype, own: torch.dtype) -> Iterator[Case]:
    """Yields the cases for powers and for linear layers of these dtypes."""
    for spelling in SPELLINGS:
        if stream == own:
            yield from _cases_without_casts(spelling, own)
        elif spelling.has_power:
            for shape, cast_rows in ((_SHAPES[0], True), (_SHAPES[0], False), (_SHAPES[1], False)):
                for with_a, sums in itertools.product(_FLAGS, _FLAGS):
                    yield Backward(spelling, stream, own, shape, with_a, sums, cast_rows=cast_rows).case()
                yield Forward(spelling, stream, own, shape, cast_rows=cast_rows).case()


def _cases_without_casts(spelling: Spelling, dtype: torch.dtype) -> Iterator[Case]:
    for shape, dropout in itertools.product(_SHAPES, _FLAGS):
        for with_a, sums in itertools.product(_FLAGS, _FLAGS):
            if with_a or sums or dropout or spelling is RELU or not spelling.is_operator:
                yield Backward(spelling, dtype, dtype, shape, with_a, sums, dropout).case()
        if spelling is RELU:
            yield Backward(spelling, dtype, dtype, shape, False, True, dropout, from_a=True).case()
        if dropout or not spelling.is_operator:
            yield Forward(spelling, dtype, dtype, shape, dropout).case()
    for with_a in _FLAGS:
        if with_a or spelling is RELU or not spelling.is_operator:
            yield ImageBackward(spelling, dtype, with_a).case()


@dataclass(frozen=True)
class _Activation:
    """An activation with what follows it in the forward."""

    spelling: Spelling
    stream: torch.dtype
    own: torch.dtype
    shape: tuple[int, ...]

    def _words(self, dropout: bool, cast: bool) -> list[str]:
        return [self.spelling.activation] + ["dropout"] * dropout + ["cast"] * cast


@dataclass(frozen=True)
class Forward(_Activation):
    """A forward: see the module's docstring. ``cast_rows``: the cast is of the matrix of all rows."""

    dropout: bool = False
    cast_rows: bool = False

    def case(self) -> Case:
        """Returns the case."""
        words = self._words(self.dropout, self.stream != self.own)
        arguments = ((self.shape, self.own), *[_KEY] * self.dropout)
        return Case(
            ", ".join(words), self.pattern, arguments, self.launch, self.spelling.forward, phase=1,
            also=draw_of(self.dropout),
        )  # fmt: skip

    def pattern(self, z: Tensor, *key: Tensor) -> Results:
        """The activation in operators."""
        a = _cast(self.spelling.function(z, self.stream), self.own, self.cast_rows)
        return (a * keep_mask(key[0], self.shape) * SCALE if key else a,)

    def launch(self, numbers: Numbers, z: Tensor, *key: Tensor) -> Results:
        """The activation by a kernel."""
        a = activations.launch_forward(
            z, None, self.spelling.activation, mask_of(numbers, key[0] if key else None)
        )
        return (a.flatten(0, -2) if self.cast_rows else a,)


@dataclass(frozen=True)
class Backward(_Activation):
    """A backward: see the module's docstring.

    Attributes:
        with_a: whether the activation is a result.
        sums: whether the sums of dz over rows are a result.
        dropout: whether dropout follows the activation.
        cast_rows: whether the cast after the activation is of the matrix of all rows.
        from_a: whether ReLU's gradient is computed from its output.
    """

    with_a: bool
    sums: bool
    dropout: bool = False
    cast_rows: bool = False
    from_a: bool = False

    def case(self) -> Case:
        """Returns the case."""
        words = self._words(self.dropout, self.stream != self.own) if self.with_a else []
        words += [f"{self.spelling.activation} backward"] + ["dropout backward"] * self.dropout
        words += ["column sums"] * self.sums
        g_shape = (math.prod(self.shape[:-1]), COLUMNS) if self.cast_rows else self.shape
        arguments: tuple[Argument, ...] = ((self.shape, self.own), (g_shape, self.own))
        arguments += (_KEY,) * self.dropout
        return Case(
            ", ".join(words), self.pattern, arguments, self.launch, self.spelling.backward, phase=0,
            also=draw_of(self.dropout),
        )  # fmt: skip

    def pattern(self, z: Tensor, g: Tensor, *key: Tensor) -> Results:
        """The gradient in operators."""
        mask = keep_mask(key[0], self.shape) if key else None
        if mask is not None:
            g = aten.native_dropout_backward(g, mask, SCALE)
        if self.from_a:
            dz = aten.threshold_backward(g, z, 0)
            return (dz, *[_column_sums(dz)] * self.sums)
        a, dz = with_gradients(self._forward, [z], g)
        a = a if mask is None else a * mask * SCALE
        return (dz, *[a] * self.with_a, *([_column_sums(dz)] if self.sums else []))

    def launch(self, numbers: Numbers, z: Tensor, g: Tensor, *key: Tensor) -> Results:
        """The gradient by a kernel."""
        found = activations.launch_backward(
            z, None, g.view(z.shape) if self.cast_rows else g, self.spelling.activation, self.with_a,
            mask_of(numbers, key[0] if key else None), with_sums=self.sums, sums_dtype=self.own,
        )  # fmt: skip
        a = [] if found.a is None else [found.a.flatten(0, -2) if self.cast_rows else found.a]
        sums = [] if found.dbias is None else [found.dbias.view(1, -1)]
        return (found.dz, *a, *sums)

    def _forward(self, z: Tensor) -> Tensor:
        return _cast(self.spelling.function(z, self.stream), self.own, self.cast_rows)


def _cast(a: Tensor, dtype: torch.dtype, rows: bool) -> Tensor:
    return (a.reshape(-1, COLUMNS) if rows else a).to(dtype)


def _column_sums(dz: Tensor) -> Tensor:
    return dz.reshape(-1, COLUMNS).sum([0], True)


@dataclass(frozen=True)
class ImageBackward:
    """A backward of four-dimensional tensors in any dense layout, such as channels-last."""

    spelling: Spelling
    dtype: torch.dtype
    with_a: bool

    def case(self) -> Case:
        """Returns the case."""
        words = [self.spelling.activation] * self.with_a + [f"{self.spelling.activation} backward", "images"]
        arguments = ((_IMAGES, self.dtype), (_IMAGES, self.dtype))
        return Case(", ".join(words), self.pattern, arguments, self.launch, self.spelling.backward, phase=0)

    def pattern(self, z: Tensor, g: Tensor) -> Results:
        """The gradient in operators."""
        a, dz = with_gradients(lambda z: self.spelling.function(z, self.dtype), [z], g)
        return (dz, *[a] * self.with_a)

    def launch(self, numbers: Numbers, z: Tensor, g: Tensor) -> Results:
        """The gradient by a kernel, which takes the elements in the order in which they lie in memory."""
        order = sorted(range(z.dim()), key=z.stride, reverse=True)
        inverse = sorted(range(z.dim()), key=order.__getitem__)
        shape = z.permute(order).shape
        columns = math.gcd(z.numel(), _MAX_COLUMNS)
        if g.stride() != z.stride() or not z.permute(order).is_contiguous() or columns < _MIN_COLUMNS:
            raise CannotLaunch("the layout is not dense, or the number of elements is odd")
        z_rows, g_rows = (t.permute(order).view(-1, columns) for t in (z, g))
        found = activations.launch_backward(z_rows, None, g_rows, self.spelling.activation, self.with_a)
        results = (found.dz, *([] if found.a is None else [found.a]))
        return tuple(t.view(shape).permute(inverse) for t in results)
