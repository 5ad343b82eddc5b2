"""Benchmark cases and tunings of dropout and residual."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
from torch import Tensor

from bench.case import KernelCase, ShapeClass, Tuning
from bench.families import keyed
from gpipe_fast.kernels import dropout_add
from gpipe_fast.kernels.dropout import CONFIGS, launch_dropout_add
from gpipe_fast.kernels.launch import Config


def inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns the input of dropout, the residual, and the key."""
    h, residual = (torch.randn(elements, dtype=dtype, device=device) for _ in range(2))
    return [h, residual, keyed.make_key(device)]


def _plain(h: Tensor, residual: Tensor, key: Tensor) -> Tensor:
    return residual + keyed.baseline(h)


def _exact(h: Tensor, residual: Tensor, key: Tensor) -> Tensor:
    return residual + keyed.exact(h, key)


def _ours(h: Tensor, residual: Tensor, key: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the output and both gradients. The residual's gradient is the output's gradient."""
    draw = keyed.draw(key)
    return dropout_add(h, residual, *draw), dropout_add(g, None, *draw), g


def _launched(h: Tensor, residual: Tensor, key: Tensor, g: Tensor) -> None:
    launch_dropout_add(h, residual, keyed.draw(key))
    launch_dropout_add(g, None, keyed.draw(key))


CASE = KernelCase(
    "dropout_add",
    inputs,
    differentiated=(0, 1),
    baseline=_plain,
    ours=_ours,
    launched=_launched,
    exact=_exact,
)


def _shape(max_elements: int) -> ShapeClass:
    sizes = ({"SIZE": size} for size in (512, 1024, 2048, 4096, 8192))
    return ShapeClass(
        partial(inputs, min(max_elements, 1 << 24)),
        [Config(size, num_warps=warps) for size, warps in product(sizes, (4, 8))],
    )


CASES = [CASE]
TUNINGS = [
    Tuning(
        "dropout_add", CASE, {f"elements<={max_elements}": _shape(max_elements) for max_elements in CONFIGS}
    )
]
