"""Sums of a tensor and a matrix product: the product adds to the tensor, and no addition follows.

Where a tensor has several uses, autograd adds the gradients of its uses one by one. A gradient that a linear
layer computes is a product; it adds to the sum so far, in place. A residual is added to a linear layer
without a bias in the same way::

    operators  mm(dz, w) -> view -> add(g, view)
    here       g = addmm(g, dz, w)

The sum is rounded once, after the addition. If another node needs ``g`` as well, the product would have to
copy it first, so nothing is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpipe_fast.fuse.family import SUMS, Argument, Case, Numbers, Results
from gpipe_fast.fuse.launchers import CannotLaunch
from gpipe_fast.fuse.patterns import BATCH, COLUMNS, HEAD, LENGTH

aten = torch.ops.aten


def cases(stream: torch.dtype, own: torch.dtype) -> Iterator[Case]:
    """Yields the case of one dtype; none for a mix of two, because a product has one."""
    if stream == own:
        yield SumInProduct(own).case()


@dataclass(frozen=True)
class SumInProduct:
    """A sum of a tensor and a product: see the module's docstring.

    It does not match gradients of parameters, which have two dimensions and are accumulated term by term.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] = (BATCH, LENGTH, COLUMNS)

    def case(self) -> Case:
        """Returns the case."""
        rows = math.prod(self.shape[:-1])
        arguments: tuple[Argument, ...] = (
            (self.shape, self.dtype),
            ((rows, HEAD), self.dtype),
            ((HEAD, COLUMNS), self.dtype),
        )
        return Case(
            "sum in a product", self.pattern, arguments, self.launch, aten.mm.default, phase=SUMS,
            also=(aten.add.Tensor,), overwrites=0,
        )  # fmt: skip

    def pattern(self, g: Tensor, dz: Tensor, w: Tensor) -> Tensor:
        """The sum."""
        return g + torch.mm(dz, w).view(self.shape)

    def launch(self, numbers: Numbers, g: Tensor, dz: Tensor, w: Tensor) -> Results:
        """Replaces `pattern`."""
        if not g.is_contiguous():
            raise CannotLaunch("the sum so far is not contiguous")
        return (torch.addmm(g.view(-1, g.shape[-1]), dz, w).view(g.shape),)
