"""The metadata of a tensor whose sizes may be formulas: a light stand-in for a fake tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpipe_fast.strides import NO_BITS, Bits, bits_of
from gpipe_fast.trace.symbols import CannotExpressError


@dataclass(frozen=True, eq=False)
class TensorMetadata:
    """A tensor's metadata, under the names that `Tensor` has for it.

    Attributes:
        shape: in elements; the type says integers, but the sizes may be formulas.
        strides: in elements.
        offset: of the first element, in elements.
        dtype: the dtype of the elements.
        device: the device.
        bits: whether the elements are conjugated, and negated, when they are read.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    bits: Bits = NO_BITS

    layout = torch.strided

    @classmethod
    def of(cls, tensor: Tensor, shape: Any, strides: Any, offset: Any) -> TensorMetadata:
        """Returns a tensor's metadata with other sizes.

        Raises:
            CannotExpressError: the tensor is sparse.
        """
        if tensor.layout is not torch.strided:
            raise CannotExpressError
        return cls(tuple(shape), tuple(strides), offset, tensor.dtype, tensor.device, bits_of(tensor))

    def stride(self) -> tuple[int, ...]:
        """As for a tensor."""
        return self.strides

    def storage_offset(self) -> int:
        """As for a tensor."""
        return self.offset

    def numel(self) -> int:
        """As for a tensor."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """As for a tensor."""
        return self.dtype.itemsize

    def is_floating_point(self) -> bool:
        """As for a tensor."""
        return self.dtype.is_floating_point

    def is_conj(self) -> bool:
        """As for a tensor."""
        return self.bits[0]

    def is_neg(self) -> bool:
        """As for a tensor."""
        return self.bits[1]


# A tensor or its metadata; ``isinstance`` accepts it.
AnyTensor = Tensor | TensorMetadata
