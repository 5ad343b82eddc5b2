"""Shared parts of the losses with class indices: input checks and reductions."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def reduction_scale(target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Returns the factor of each row's loss in a reduction, in fp32."""
    if reduction != "mean":
        return torch.ones((), dtype=torch.float32, device=target.device)
    return 1.0 / (target != ignore_index).sum().to(torch.float32)


def reduce_losses(losses: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Returns the mean or the sum of the rows' losses, accumulated in fp64, or the losses themselves."""
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum(dtype=torch.float64)
    if reduction == "mean":
        total = total / (target != ignore_index).sum()
    return total.to(torch.float32)


def check(source: Tensor, target: Tensor, shape: torch.Size, label_smoothing: float) -> None:
    """Raises ValueError if the arguments of a loss do not match.

    Args:
        source: the tensor that gives dtype and device: the logits, or the input of the last layer.
        target: the class indices.
        shape: the shape of the logits.
        label_smoothing: the weight of the uniform distribution in the target.
    """
    if source.dtype not in DTYPES:
        raise ValueError(f"the loss supports only fp32, fp16 and bf16, got {source.dtype}; convert the input")
    if target.dtype != torch.int64:
        raise ValueError(f"targets must be class indices in int64, got {target.dtype}")
    if not shape or target.shape != shape[:-1]:
        raise ValueError(
            f"targets must have the shape of the logits {list(shape)} without the last dimension, "
            f"got {list(target.shape)}"
        )
    if target.device != source.device:
        raise ValueError(f"targets must be on {source.device}, got {target.device}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label smoothing must be from 0 to 1, got {label_smoothing}")


def check_reduction(reduction: str, known: tuple[str, ...]) -> None:
    """Raises ValueError if the reduction is unknown."""
    if reduction not in known:
        raise ValueError(f"reduction is not one of {', '.join(known)}, got {reduction!r}")
