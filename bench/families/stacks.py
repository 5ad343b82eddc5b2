"""Benchmark cases and tunings of the gradients of query, key and value as one matrix."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
from torch import Tensor

from bench.case import KernelCase, ShapeClass, Tuning
from gpipe_fast.kernels.launch import Config, kernels_available
from gpipe_fast.kernels.stack import CONFIGS, MAX_PARTS, launch_stack

HEADS, HEAD_DIM, MAX_LENGTH = 16, 64, 512


def inputs(elements: int, dtype: torch.dtype, device: str, heads: int = HEADS) -> list[Tensor]:
    """Returns dq, dk, dv of shape (batch, heads, length, head_dim). ``elements`` counts all three."""
    positions = max(1, elements // (MAX_PARTS * heads * HEAD_DIM))
    length = min(positions, MAX_LENGTH)
    shape = (positions // length, heads, length, HEAD_DIM)
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


CASE = KernelCase("stack 3 parts", inputs, differentiated=(), baseline=_plain, ours=_ours, launched=_launched)


def _shape(widest: int) -> ShapeClass:
    blocks = [{"ROWS": rows, "COLS": cols} for rows, cols in product((8, 16, 32), (64, 128))]
    return ShapeClass(
        partial(inputs, 1 << 24, heads=min(HEADS, widest // HEAD_DIM)),
        [Config(block, num_warps=warps) for block, warps in product(blocks, (4, 8))],
    )


CASES = [CASE]
TUNINGS = [Tuning("stack", CASE, {f"cols<={widest}": _shape(widest) for widest in CONFIGS})]
