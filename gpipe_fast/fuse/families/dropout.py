"""Dropout with a keyed mask, with the addition of a residual, and its gradient (kernels/dropout.py).

With a residual stream of dtype S and a linear layer of dtype L::

    forward   x = residual + dropout(h)            S, from h in L
    backward  dh = dropout's gradient of g         L, from g in L, or in S and cast to L

The mask is drawn again wherever it is used. Where a norm follows or precedes, families/norms.py takes more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpipe_fast.fuse.families.norms import keep_mask, mask_of
from gpipe_fast.fuse.family import Argument, Case, Numbers, Results
from gpipe_fast.fuse.patterns import BATCH, COLUMNS, HEADS, LENGTH, SCALE
from gpipe_fast.kernels.dropout import launch_dropout_add

aten = torch.ops.aten

_KEY: Argument = ((3,), torch.int64)
_SHAPES = ((BATCH, LENGTH, COLUMNS), (BATCH, COLUMNS), (BATCH, HEADS, LENGTH, COLUMNS))


def cases(stream: torch.dtype, own: torch.dtype) -> Iterator[Case]:
    """Yields the cases for a residual stream and for linear layers of these dtypes."""
    for shape in _SHAPES:
        yield Dropout(stream, own, shape).gradient_case()
        yield Dropout(stream, own, shape).residual_case()
        if stream == own:
            yield Dropout(stream, own, shape).case()


@dataclass(frozen=True)
class Dropout:
    """Dropout of a tensor of one shape: see the module's docstring."""

    stream: torch.dtype
    own: torch.dtype
    shape: tuple[int, ...]

    def case(self) -> Case:
        """Returns the case of dropout alone."""
        return self._case("dropout", self.forward, self.launch, ((self.shape, self.own), _KEY), 1)

    def residual_case(self) -> Case:
        """Returns the case of dropout and the addition of a residual."""
        arguments = ((self.shape, self.own), (self.shape, self.stream), _KEY)
        return self._case("dropout, add", self.forward_and_add, self.launch_and_add, arguments, 1)

    def gradient_case(self) -> Case:
        """Returns the case of the gradient, with a cast of the incoming gradient where the dtypes differ."""
        words = "cast, " * (self.stream != self.own) + "dropout backward"
        return self._case(words, self.gradient, self.launch, ((self.shape, self.stream), _KEY), 0)

    def _case(
        self, name: str, pattern: object, launcher: object, arguments: tuple[Argument, ...], phase: int
    ) -> Case:
        anchor = torch.ops.gpipe_fast.keyed_bernoulli.default
        return Case(name, pattern, arguments, launcher, anchor, phase)  # type: ignore[arg-type]

    def forward(self, h: Tensor, key: Tensor) -> Tensor:
        """Dropout."""
        return h * keep_mask(key, self.shape) * SCALE

    def forward_and_add(self, h: Tensor, residual: Tensor, key: Tensor) -> Tensor:
        """Dropout and the addition of a residual."""
        return residual + self.forward(h, key)

    def gradient(self, g: Tensor, key: Tensor) -> Tensor:
        """The gradient of dropout."""
        dh: Tensor = aten.native_dropout_backward(g.to(self.own), keep_mask(key, self.shape), SCALE)
        return dh

    def launch(self, numbers: Numbers, h: Tensor, key: Tensor) -> Results:
        """Replaces `forward` and `gradient`."""
        mask = mask_of(numbers, key)
        assert mask is not None
        return (launch_dropout_add(h, None, mask, y_dtype=self.own),)

    def launch_and_add(self, numbers: Numbers, h: Tensor, residual: Tensor, key: Tensor) -> Results:
        """Replaces `forward_and_add`."""
        mask = mask_of(numbers, key)
        assert mask is not None
        return (launch_dropout_add(h, residual, mask, y_dtype=self.stream),)
