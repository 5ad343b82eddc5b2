"""The layouts in which a loss usually produces the gradients of a module's joined outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpipe_fast.runtime.compiled import GradientStrides
from gpipe_fast.runtime.stage import TensorSpec


def joined_strides(outputs: Sequence[tuple[TensorSpec, ...]], dim: int, count: int) -> list[GradientStrides]:
    """Returns, for each distinct micro-batch, the strides of its slices of the module's joined outputs.

    A loss usually produces gradients in this layout.
    """
    found: list[GradientStrides] = [{} for _ in outputs]
    for index in range(min(len(specs) for specs in outputs)):
        parts = [specs[index].meta_tensor() for specs in outputs]
        # A later check raises for outputs that cannot be joined, with their shapes.
        strides: tuple[int, ...] = ()
        if all(part.dim() for part in parts) and (dim == 0 or _can_concatenate(parts, dim)):
            # Unless outputs are joined along dimension 0, the strides depend on the total length.
            whole = [parts[0]] * ((2 if dim == 0 else count) - len(parts)) + parts
            strides = torch.cat(whole, dim).stride()
        for gradients in found:
            gradients[index] = strides
    return found


def _can_concatenate(parts: Sequence[Tensor], dim: int) -> bool:
    """Returns whether tensors can be concatenated along a dimension."""
    if any(not -part.dim() <= dim < part.dim() for part in parts):
        return False
    return len({part.narrow(dim, 0, 0).shape for part in parts}) == 1
