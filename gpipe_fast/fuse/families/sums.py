"""Sums of the gradients of a tensor with several uses (kernels/sums.py), as autograd adds them: one by one.

With a residual stream of dtype S and linear layers of dtype L, under autocast every gradient is cast first::

    y = ((a + b) + c) + d      in S, from a in S or L, and b, c, d in L
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpipe_fast.fuse.family import Argument, Case, Numbers, Results
from gpipe_fast.fuse.patterns import BATCH, COLUMNS, LENGTH
from gpipe_fast.kernels.sums import launch_sum

aten = torch.ops.aten


def cases(stream: torch.dtype, own: torch.dtype) -> Iterator[Case]:
    """Yields the cases for a residual stream and for linear layers of these dtypes."""
    shapes = ((BATCH, LENGTH, COLUMNS), (BATCH, COLUMNS))
    firsts = (stream, own) if stream != own else (stream,)
    for shape, first, count in itertools.product(shapes, firsts, (4, 3, 2)):
        if count > 2 or stream != own:
            yield Sum(stream, own, shape, first, count).case()


@dataclass(frozen=True)
class Sum:
    """A sum: see the module's docstring.

    Attributes:
        stream: the dtype of the sum.
        own: the dtype of all tensors but the first.
        shape: the shape of each tensor.
        first: the dtype of the first tensor.
        count: the number of tensors.
    """

    stream: torch.dtype
    own: torch.dtype
    shape: tuple[int, ...]
    first: torch.dtype
    count: int

    def case(self) -> Case:
        """Returns the case."""
        arguments: tuple[Argument, ...] = (
            (self.shape, self.first),
            *[(self.shape, self.own)] * (self.count - 1),
        )
        return Case(f"sum of {self.count}", self.pattern, arguments, self.launch, aten.add.Tensor, phase=3)

    def pattern(self, *tensors: Tensor) -> Tensor:
        """The sum."""
        wide = [tensor.to(self.stream) for tensor in tensors]
        total = wide[0]
        for tensor in wide[1:]:
            total = total + tensor
        return total

    def launch(self, numbers: Numbers, *tensors: Tensor) -> Results:
        """Replaces `pattern`."""
        return (launch_sum(tensors, self.stream),)
