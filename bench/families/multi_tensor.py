"""Benchmark cases and tunings of the multi-tensor kernels: accumulation in fp32, and unscaling."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from bench.case import KernelCase, ShapeClass, Tuning
from gpipe_fast.kernels import accumulate_, unscale_
from gpipe_fast.kernels.launch import Config
from gpipe_fast.kernels.multi_tensor import CONFIGS, launch_accumulate, launch_unscale

# Number of tensors: matrices and vectors alternate.
TENSORS = 64
INVERSE_SCALE = 0.75


def gradients(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns gradients of alternating matrices and vectors; a vector has 1/1024 of the elements of both."""
    both = elements // (TENSORS // 2)
    vector = max(1, both >> 10)
    sizes = (both - vector, vector) * (TENSORS // 2)
    return [torch.randn(size, dtype=dtype, device=device) for size in sizes]


def accumulate_inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns the accumulators, then the gradients."""
    return [*gradients(elements, torch.float32, device), *gradients(elements, dtype, device)]


def unscale_inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns the gradients, then the inverse of the loss scale."""
    return [*gradients(elements, dtype, device), torch.full((1,), INVERSE_SCALE, device=device)]


def _accumulate(*tensors: Tensor) -> Sequence[Tensor]:
    accumulate_(tensors[:TENSORS], tensors[TENSORS:])
    return tensors[:TENSORS]


def _unscale(*tensors: Tensor) -> list[Tensor]:
    return [*tensors[:-1], unscale_(tensors[:-1], tensors[-1])]


def _plain_unscale(*tensors: Tensor) -> list[Tensor]:
    """Unscales with the operator of `torch.amp.GradScaler`."""
    found = tensors[-1].new_zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(list(tensors[:-1]), found, tensors[-1])
    return [*tensors[:-1], found]


def _exact_unscale(*tensors: Tensor) -> list[Tensor]:
    scale = tensors[-1]
    return [*((g * scale).to(g.dtype) for g in tensors[:-1]), torch.zeros_like(scale)]


def _allocate_on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Allocates meta tensors on the CPU: launchers need addresses. Their memory is not accessed."""
    return [torch.empty_like(t, device="cpu") for t in tensors]


def _launched_accumulate(*tensors: Tensor) -> None:
    own = _allocate_on_cpu(tensors)
    launch_accumulate(own[:TENSORS], own[TENSORS:], None, None)


def _launched_unscale(*tensors: Tensor) -> None:
    *own, scale = _allocate_on_cpu(tensors)
    launch_unscale(own, scale, torch.empty_like(scale))


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


ACCUMULATE = KernelCase(
    "multi_tensor accumulate into fp32",
    accumulate_inputs,
    differentiated=(),
    baseline=lambda *tensors: torch._foreach_add(tensors[:TENSORS], tensors[TENSORS:]),
    ours=_accumulate,
    launched=_launched_accumulate,
    overwritten=range(TENSORS),
    moved=lambda tensors, _: 2 * _bytes(tensors[:TENSORS]) + _bytes(tensors[TENSORS:]),
)
UNSCALE = KernelCase(
    "multi_tensor unscale",
    unscale_inputs,
    differentiated=(),
    baseline=_plain_unscale,
    ours=_unscale,
    launched=_launched_unscale,
    overwritten=range(TENSORS),
    exact=_exact_unscale,
    moved=lambda tensors, _: 2 * _bytes(tensors[:-1]),
)


def _shape(max_elements: int) -> ShapeClass:
    sizes = ({"BLOCK": size} for size in (1024, 2048, 4096, 8192, 16384))
    return ShapeClass(
        partial(accumulate_inputs, min(max_elements, 1 << 26)),
        [Config(size, num_warps=warps) for size, warps in product(sizes, (4, 8))],
    )


CASES = [ACCUMULATE, UNSCALE]
TUNINGS = [
    Tuning(
        "multi_tensor",
        ACCUMULATE,
        {f"elements<={max_elements}": _shape(max_elements) for max_elements in CONFIGS},
    )
]
