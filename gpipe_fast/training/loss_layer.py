"""The layer behind the last one: it computes the loss of a micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast.layers.skip import GIVEN, Skippable, pop, skippable
from gpipe_fast.layers.structure import Structure
from gpipe_fast.torch_private import pytree
from gpipe_fast.training.losses import Loss


def loss_layer(
    loss: Loss, structure: Structure | None, num_tensors: int, keeps_output: bool, dim: int
) -> nn.Module:
    """Returns a layer that computes a loss of its input and of tensors that the caller gives.

    Args:
        loss: the loss.
        structure: the nesting of the target; None if the loss has no target.
        num_tensors: the number of tensors of the target.
        keeps_output: whether the layer also returns its input, detached.
        dim: the dimension along which outputs of micro-batches are concatenated.

    Returns:
        The layer. It returns the loss in the shape `shape_of_loss`.
    """
    layer: Skippable = _layer_class(num_tensors)(loss.total, structure, keeps_output, dim)
    return layer.isolate(GIVEN)


def shape_of_loss(dim: int) -> list[int]:
    """Returns the shape of one element with a dimension ``dim``, which may be negative."""
    return [1] * (dim + 1 if dim >= 0 else -dim)


@functools.cache
def _layer_class(num_tensors: int) -> type[Skippable]:
    """Returns the class of layers for targets of this many tensors."""

    class Loss(nn.Module):
        def __init__(self, total: Any, structure: Structure | None, keeps_output: bool, dim: int) -> None:
            super().__init__()
            self.total, self.structure, self.keeps_output, self.dim = total, structure, keeps_output, dim

        def forward(self, output: Any) -> Generator[Any, Any, Any]:
            tensors = []
            for index in range(num_tensors):
                tensor = yield pop(f"target{index}")
                tensors.append(tensor)
            target = () if self.structure is None else (self.structure.build(tensors),)
            loss = self.total(output, *target)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ValueError(
                    f"loss_fn must return a tensor with one element, got {getattr(loss, 'shape', loss)}; let "
                    "it return a sum"
                )
            if loss.dtype in (torch.bfloat16, torch.float16):
                loss = loss.float()  # the losses of micro-batches are added up in float32
            loss = loss.reshape(shape_of_loss(self.dim))
            if not self.keeps_output:
                return loss
            return loss, pytree.tree_map_only(Tensor, Tensor.detach, output)

    return skippable(pop=[f"target{index}" for index in range(num_tensors)])(Loss)
