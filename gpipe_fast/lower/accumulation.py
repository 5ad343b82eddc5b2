"""Accumulation of parameter gradients over micro-batches: its precision and the kernels that add."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from gpipe_fast._extension import ActiveRuns
from gpipe_fast.lower.bitwise_addmm import addmm_is_bitwise_equal
from gpipe_fast.lower.steps import Accumulate, AccumulateAll
from gpipe_fast.trace.tensor_metadata import AnyTensor

# Gradients of more bytes are added as soon as they are computed: their launch overhead is negligible.
MAX_COALESCED_GRADIENT_BYTES = 1 << 20
# The largest total size, in bytes, of the gradients pending for one kernel: pending gradients occupy memory.
MAX_PENDING_BYTES = 8 << 20


def sum_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Returns the dtype in which a parameter's gradients are summed over micro-batches.

    Args:
        own: the parameter's dtype.
        wanted: ``GPipe``'s ``grad_dtype``.
    """
    is_low_precision = own in (torch.bfloat16, torch.float16)
    return wanted if wanted is not None and is_low_precision else own


@dataclass(frozen=True)
class AccumulationPolicy:
    """How programs accumulate parameter gradients.

    Attributes:
        dtype: the dtype in which bfloat16 and float16 gradients are summed; None for the gradient's dtype.
        deterministic: whether sums on a GPU equal the plain loop's bit for bit; sums on the CPU always do.
    """

    dtype: torch.dtype | None = None
    deterministic: bool = False

    def sum_dtype(self, gradient: AnyTensor) -> torch.dtype:
        """Returns the dtype of the accumulator for a gradient like `gradient`."""
        return sum_dtype(gradient.dtype, self.dtype)

    def has_wider_accumulator(self, gradient: AnyTensor) -> bool:
        """Returns whether the accumulator's dtype differs from the gradient's, and so has more precision.

        In that case the contributions of one micro-batch are first summed in the gradient's dtype, as
        autograd sums them, also where a parameter has several uses; only the sum over micro-batches uses
        the accumulator's dtype.
        """
        return self.sum_dtype(gradient) != gradient.dtype

    def can_use_addmm(self, a: AnyTensor, b: AnyTensor) -> bool:
        """Returns whether a matrix product may add its result to the accumulator (`addmm`).

        On a GPU this saves one kernel and a temporary, but rounds once where a product and a sum round twice.
        """
        if a.device.type == "cuda":
            return not self.deterministic and a.is_floating_point()
        return addmm_is_bitwise_equal(a, b)

    @staticmethod
    def can_skip_cast(node: fx.Node) -> bool:
        """Returns whether a sum can read the operand of `node`, a cast to float32 such as autocast inserts.

        Widening casts are exact, so the sum is the same, and a GPU saves a kernel and a temporary.
        """
        if node.target is not torch.ops.aten._to_copy.default or not isinstance(node.args[0], fx.Node):
            return False
        before, after = node.args[0].meta["val"], node.meta["val"]
        is_exact = before.dtype in (torch.bfloat16, torch.float16) and after.dtype is torch.float32
        return is_exact and before.device.type == "cuda" and after.device == before.device


class PendingAccumulations:
    """Gradients on a GPU that wait for one kernel, which adds all of them to their accumulators."""

    def __init__(self) -> None:
        self._accumulators: list[int] = []
        self._values: list[int] = []
        self._bytes = 0

    def add(self, accumulator: int, value: int, like: AnyTensor) -> list[Accumulate | AccumulateAll]:
        """Adds a gradient for later runs of the program; returns the steps to append now."""
        size = like.numel() * like.element_size()
        if like.device.type != "cuda" or size > MAX_COALESCED_GRADIENT_BYTES:
            return [Accumulate(accumulator, value, ActiveRuns.LATER)]
        flushed = self.flush() if self._bytes + size > MAX_PENDING_BYTES else []
        self._accumulators.append(accumulator)
        self._values.append(value)
        self._bytes += size
        return flushed

    def flush(self) -> list[Accumulate | AccumulateAll]:
        """Returns the steps that add all pending gradients, and clears them."""
        accumulators, values = self._accumulators, self._values
        self._accumulators, self._values, self._bytes = [], [], 0
        if not values:
            return []
        return [AccumulateAll(tuple(accumulators), tuple(values), ActiveRuns.LATER)]
