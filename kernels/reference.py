"""Reference implementations of the losses' kernels in plain PyTorch; they also compute on CPU tensors.

Like the kernels, they compute at least in fp32 and round the result to the dtype of the input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def to_fp32_or_wider(tensor: Tensor) -> Tensor:
    """Converts a tensor to fp32; leaves fp64 unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def cross_entropy(
    logits: Tensor, target: Tensor, scale: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Returns the loss of each row and its scaled gradient, for two-dimensional logits."""
    x = to_fp32_or_wider(logits)
    losses = F.cross_entropy(
        x, target, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    ignored = (target == ignore_index).unsqueeze(-1)
    gradient = x.softmax(-1) - label_smoothing / max(1, x.shape[-1])
    classes = target.unsqueeze(-1).masked_fill(ignored, 0)
    gradient = gradient.scatter_add(
        -1, classes, gradient.new_full((1, 1), label_smoothing - 1).expand_as(classes)
    )
    return losses, (gradient * scale).masked_fill(ignored, 0).to(logits.dtype)


def scale_(gradient: Tensor, g: Tensor) -> None:
    """Computes ``gradient *= g``, where g has one element, or one per row."""
    gradient.copy_(to_fp32_or_wider(gradient) * (g if g.dim() == 0 else g.unsqueeze(-1)))
