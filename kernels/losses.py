"""What losses of class indices share: which input they take, and how losses of rows become one."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def scale_of(target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """By what a reduction multiplies each row's loss, in fp32."""
    if reduction != "mean":
        return torch.ones((), dtype=torch.float32, device=target.device)
    return 1.0 / (target != ignore_index).sum().to(torch.float32)


def reduced(losses: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Mean or sum, added up in fp64, or the losses themselves."""
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum(dtype=torch.float64)
    if reduction == "mean":
        total = total / (target != ignore_index).sum()
    return total.to(torch.float32)


def check(source: Tensor, target: Tensor, shape: torch.Size, label_smoothing: float) -> None:
    """Raises ValueError where logits of a shape, computed from a source, do not go with the rest."""
    if source.dtype not in DTYPES:
        raise ValueError(f"only fp32, fp16 and bf16 are taken, got {source.dtype}")
    if target.dtype != torch.int64:
        raise ValueError(f"targets must be class indices in int64, got {target.dtype}")
    if not shape or target.shape != shape[:-1]:
        raise ValueError(
            f"targets must have all but the last dimension of {list(shape)}, got {list(target.shape)}"
        )
    if target.device != source.device:
        raise ValueError(f"targets must be on {source.device}, got {target.device}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label smoothing must be from 0 to 1, got {label_smoothing}")


def check_reduction(reduction: str, known: tuple[str, ...]) -> None:
    """Raises ValueError where there is no such reduction."""
    if reduction not in known:
        raise ValueError(f"reduction is not one of {', '.join(known)}, got {reduction!r}")
