"""Benchmark case of the gradients of query, key and value as one matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.gpu.case import KernelCase
from gpipe_fast.kernels.launch import kernels_available
from gpipe_fast.kernels.stack import MAX_PARTS, launch_stack

HEADS, HEAD_DIM, MAX_LENGTH = 16, 64, 512


def inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns dq, dk, dv of shape (batch, heads, length, head_dim). ``elements`` counts all three."""
    positions = max(1, elements // (MAX_PARTS * HEADS * HEAD_DIM))
    length = min(positions, MAX_LENGTH)
    shape = (positions // length, HEADS, length, HEAD_DIM)
    return [torch.randn(shape, dtype=dtype, device=device) for _ in range(MAX_PARTS)]


def _plain(*parts: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenates, then reads the matrix again for the sums."""
    matrix = torch.cat([part.transpose(1, 2).flatten(2) for part in parts], -1).flatten(0, 1)
    return matrix, matrix.sum(0)


def _ours(*parts: Tensor) -> tuple[Tensor, Tensor]:
    if not kernels_available(*parts):
        return _plain(*parts)
    matrix, sums = launch_stack([part.transpose(1, 2) for part in parts])
    return matrix, sums.to(matrix.dtype)


def _launched(*parts: Tensor) -> None:
    launch_stack([part.transpose(1, 2) for part in parts])


CASES = [
    KernelCase("stack 3 parts", inputs, differentiated=(), baseline=_plain, ours=_ours, launched=_launched)
]
