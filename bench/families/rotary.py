"""Benchmark cases and tunings of rotary position embedding, in place."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
from torch import Tensor

from bench import liger
from bench.case import KernelCase, ShapeClass, Tuning
from gpipe_fast.kernels import rotary_, rotary_backward_, rotary_tables
from gpipe_fast.kernels.launch import Config
from gpipe_fast.kernels.rotary import CONFIGS, launch_in_place

HEADS, HEAD_DIM = 16, 128
MAX_LENGTH = 2048
BLOCK_PAIRS = (512, 1024, 2048)


def inputs(elements: int, dtype: torch.dtype, device: str, head_dim: int = HEAD_DIM) -> list[Tensor]:
    """Returns queries and keys, and fp32 tables for all dimensions of a head. ``elements`` counts q and k."""
    positions = max(1, elements // (2 * HEADS * head_dim))
    length = min(positions, MAX_LENGTH)
    shape = (positions // length, length, HEADS, head_dim)
    q, k = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    return [q, k, *rotary_tables(torch.arange(length, device=device), head_dim)]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x in x's dtype throughout, as models do."""
    x1, x2 = x.chunk(2, -1)
    c, s = (table.to(x.dtype)[:, None] for table in (cos, sin))
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1)


def _plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _ours(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dq: Tensor, dk: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *rotary_(q, k, cos, sin), *rotary_backward_(dq, dk, cos, sin)


def _launched(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dq: Tensor, dk: Tensor) -> None:
    launch_in_place(q, k, cos, sin, False, False)
    launch_in_place(dq, dk, cos, sin, False, True)


def _liger(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    whole = (torch.cat((table, table), -1)[None] for table in (cos, sin))
    turned = liger.rotary(q.transpose(1, 2), k.transpose(1, 2), *whole)
    return [x.transpose(1, 2) for x in turned]


CASE = KernelCase(
    "rotary halves",
    inputs,
    differentiated=(0, 1),
    baseline=_plain,
    ours=_ours,
    launched=_launched,
    overwritten=(0, 1, 4, 5),
    liger=_liger,
)


def _shape(widest: int) -> ShapeClass:
    pairs = min(widest, 128)
    blocks = [
        {"POSITIONS": count // (pairs * heads), "HEADS": heads}
        for count, heads in product(BLOCK_PAIRS, (1, 2, 4, 8, 16))
        if pairs * heads <= count
    ]
    return ShapeClass(
        partial(inputs, 1 << 24, head_dim=2 * pairs),
        [Config(sizes, num_warps=warps) for sizes, warps in product(blocks, (4, 8))],
    )


CASES = [CASE]
TUNINGS = [Tuning("rotary", CASE, {f"pairs<={widest}": _shape(widest) for widest in CONFIGS})]
