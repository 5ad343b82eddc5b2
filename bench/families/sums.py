"""Benchmark cases and tunings of sums of gradients."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
from torch import Tensor

from bench.case import KernelCase, ShapeClass, Tuning
from gpipe_fast.kernels.launch import Config, kernels_available
from gpipe_fast.kernels.sums import CONFIGS, MAX_TENSORS, launch_sum


def inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns the gradients of a tensor with four uses."""
    return [torch.randn(elements, dtype=dtype, device=device) for _ in range(MAX_TENSORS)]


def _plain(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Adds as autograd does: one by one."""
    return ((a + b) + c) + d


def _ours(*tensors: Tensor) -> Tensor:
    """Sums in fp32 and rounds once, without kernels on the CPU."""
    if kernels_available(*tensors):
        return launch_sum(tensors, tensors[0].dtype)
    return _plain(*(t.float() for t in tensors)).to(tensors[0].dtype)


def _launched(*tensors: Tensor) -> None:
    launch_sum(tensors, tensors[0].dtype)


CASE = KernelCase("sum of four", inputs, differentiated=(), baseline=_plain, ours=_ours, launched=_launched)


def _shape(max_elements: int) -> ShapeClass:
    sizes = ({"SIZE": size} for size in (512, 1024, 2048, 4096, 8192))
    return ShapeClass(
        partial(inputs, min(max_elements, 1 << 24)),
        [Config(size, num_warps=warps) for size, warps in product(sizes, (4, 8))],
    )


CASES = [CASE]
TUNINGS = [
    Tuning("sum", CASE, {f"elements<={max_elements}": _shape(max_elements) for max_elements in CONFIGS})
]
