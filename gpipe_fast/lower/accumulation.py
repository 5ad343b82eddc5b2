"""How gradients of parameters are added up over micro-batches: in what precision, and by what."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from gpipe_fast._extension import When
from gpipe_fast.lower.exactness import accumulates_exactly
from gpipe_fast.lower.program import Accumulate, AccumulateAll

# Gradients with more bytes are added as soon as they are there: beside adding them, a launch is little.
LARGE = 1 << 20
# Of those that wait to be added together: their memory cannot be used for anything else meanwhile.
WAITING = 8 << 20


def sum_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """In what gradients of a parameter are added up over micro-batches.

    Args:
        own: the parameter's dtype.
        wanted: ``GPipe``'s ``grad_dtype``.
    """
    lower = own in (torch.bfloat16, torch.float16)
    return wanted if wanted is not None and lower else own


@dataclass(frozen=True)
class Accumulation:
    """What programs do with gradients.

    Attributes:
        dtype: in what those of lower precision are added up; None for their own.
        deterministic: whether sums on a GPU are those of the plain loop, bit for bit; on the CPU they always
            are.
    """

    dtype: torch.dtype | None = None
    deterministic: bool = False

    def sum_dtype(self, gradient: Tensor) -> torch.dtype:
        """Of the accumulator for such a gradient."""
        return sum_dtype(gradient.dtype, self.dtype)

    def is_higher(self, gradient: Tensor) -> bool:
        """Whether the accumulator is of more precision.

        A micro-batch's gradient is then what autograd makes of it, in its own dtype, also where a parameter
        is used several times; what is summed in the other dtype are those.
        """
        return self.sum_dtype(gradient) != gradient.dtype

    def in_product(self, a: Tensor, b: Tensor) -> bool:
        """Whether the product of two matrices may add to the accumulator itself.

        On a GPU that is one kernel instead of two, and no temporary. It rounds once where product and sum
        would twice.
        """
        if a.device.type == "cuda":
            return not self.deterministic and a.is_floating_point()
        return accumulates_exactly(a, b)

    @staticmethod
    def in_cast(node: fx.Node) -> bool:
        """Whether a sum can take what a node casts, as autocast does with gradients, as it was before.

        It is exact, and saves a GPU a kernel and a temporary.
        """
        if node.target is not torch.ops.aten._to_copy.default or not isinstance(node.args[0], fx.Node):
            return False
        before, after = node.args[0].meta["val"], node.meta["val"]
        is_exact = before.dtype in (torch.bfloat16, torch.float16) and after.dtype is torch.float32
        return is_exact and before.device.type == "cuda" and after.device == before.device


class Waiting:
    """Gradients on a GPU that are added together, by one kernel, instead of by one each."""

    def __init__(self) -> None:
        self._accumulators: list[int] = []
        self._values: list[int] = []
        self._bytes = 0

    def add(self, accumulator: int, value: int, like: Tensor) -> list[Accumulate | AccumulateAll]:
        """Takes a gradient, for later runs of the program; returns what to do at once."""
        size = like.numel() * like.element_size()
        if like.device.type != "cuda" or size > LARGE:
            return [Accumulate(accumulator, value, When.LATER)]
        before = self.done() if self._bytes + size > WAITING else []
        self._accumulators.append(accumulator)
        self._values.append(value)
        self._bytes += size
        return before

    def done(self) -> list[Accumulate | AccumulateAll]:
        """Adds all that wait."""
        accumulators, values = self._accumulators, self._values
        self._accumulators, self._values, self._bytes = [], [], 0
        if not values:
            return []
        return [AccumulateAll(tuple(accumulators), tuple(values), When.LATER)]
