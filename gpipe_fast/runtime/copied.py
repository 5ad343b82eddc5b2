"""Copies of tensors that layers may write, and from which they compute the same bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpipe_fast.strides import span

# To which PyTorch aligns memory, in bytes; matrix products may round otherwise where it is not.
_ALIGNMENT = 64


class _Copied(torch.autograd.Function):
    """A copy whose memory is laid out and aligned as the original's, overlaps and gaps included."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        length = span(tensor.shape, tensor.stride())
        memory = tensor.new_empty(length + _ALIGNMENT)
        beyond = (tensor.data_ptr() - memory.data_ptr()) % _ALIGNMENT
        begin = beyond // tensor.element_size()
        memory[begin : begin + length].copy_(tensor.as_strided((length,), (1,)))
        # Not a view of it, which a layer may not write.
        storage = memory.untyped_storage()
        return tensor.new_empty(0).set_(storage, begin, tensor.shape, tensor.stride())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def copied_for_writing(tensor: Tensor) -> Tensor:
    """A copy that is laid out and aligned as the original, and differentiable."""
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return tensor.clone()
    if tensor.data_ptr() % _ALIGNMENT == 0:
        copy = tensor.clone()
        if copy.stride() == tensor.stride():
            return copy
    copied: Tensor = _Copied.apply(tensor)
    return copied
