"""Benchmark case of the mean of losses."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.gpu.case import KernelCase
from gpipe_fast.kernels.launch import kernels_available
from gpipe_fast.kernels.mean_loss import launch_loss

IGNORED = -100


def inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns fp32 losses of rows, and their targets, some of which are ignored."""
    losses, target = torch.rand(elements, device=device), torch.randint(100, (elements,), device=device)
    ignored = torch.arange(elements, device=device) % 8 == 0
    return [losses.masked_fill(ignored, 0.0), target.masked_fill(ignored, IGNORED)]


def _plain(losses: Tensor, target: Tensor) -> Tensor:
    return losses.sum() / (target != IGNORED).sum()


def _ours(losses: Tensor, target: Tensor) -> Tensor:
    return (_launched if kernels_available(losses) else _plain)(losses, target)


def _launched(losses: Tensor, target: Tensor) -> Tensor:
    return launch_loss(losses, target, IGNORED, mean=True, dtype=losses.dtype)


CASES = [KernelCase("mean_loss", inputs, differentiated=(), baseline=_plain, ours=_ours, launched=_launched)]
