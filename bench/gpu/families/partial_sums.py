"""Benchmark case of the addition of partial sums."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.gpu.case import KernelCase
from gpipe_fast.kernels.launch import DEFAULT_MULTIPROCESSORS, kernels_available
from gpipe_fast.kernels.partial_sums import MAX_MATRICES, launch_partial_sums


def inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns the matrices that one program per multiprocessor writes; they are fp32 for every dtype."""
    columns = max(1, elements // (MAX_MATRICES * DEFAULT_MULTIPROCESSORS))
    return [torch.randn(DEFAULT_MULTIPROCESSORS, columns, device=device) for _ in range(MAX_MATRICES)]


def _plain(*matrices: Tensor) -> list[Tensor]:
    return [matrix.sum(0) for matrix in matrices]


def _ours(*matrices: Tensor) -> list[Tensor | None]:
    return _launched(*matrices) if kernels_available(*matrices) else [*_plain(*matrices)]


def _launched(*matrices: Tensor) -> list[Tensor | None]:
    return launch_partial_sums(matrices, [None] * len(matrices))


CASES = [
    KernelCase("partial sums", inputs, differentiated=(), baseline=_plain, ours=_ours, launched=_launched)
]
