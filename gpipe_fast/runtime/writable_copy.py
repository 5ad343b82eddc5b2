"""Writable copies of tensors, from which layers compute the same bits as from the originals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpipe_fast.strides import span

# PyTorch's alignment of memory in bytes; matrix products of memory aligned differently may round differently.
_ALIGNMENT = 64


class _WritableCopy(torch.autograd.Function):
    """A copy with the original's strides and alignment, including overlaps and gaps in memory."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        length = span(tensor.shape, tensor.stride())
        memory = tensor.new_empty(length + _ALIGNMENT)
        misalignment = (tensor.data_ptr() - memory.data_ptr()) % _ALIGNMENT
        begin = misalignment // tensor.element_size()
        memory[begin : begin + length].copy_(tensor.as_strided((length,), (1,)))
        # A tensor on the same storage, not a view: autograd forbids writing a view that a Function returns.
        storage = memory.untyped_storage()
        return tensor.new_empty(0).set_(storage, begin, tensor.shape, tensor.stride())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def writable_copy(tensor: Tensor) -> Tensor:
    """Returns a differentiable copy with the original's strides and alignment."""
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return tensor.clone()
    if tensor.data_ptr() % _ALIGNMENT == 0:
        copy = tensor.clone()
        if copy.stride() == tensor.stride():
            return copy
    copied: Tensor = _WritableCopy.apply(tensor)
    return copied
