"""Benchmark case of rotary position embedding as transformers spells it."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.gpu import liger
from bench.gpu.case import KernelCase
from gpipe_fast.kernels.launch import kernels_available
from gpipe_fast.kernels.rotate_half import launch_rotate_half

HEADS, HEAD_DIM, MAX_LENGTH = 16, 128, 2048


def inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns queries and keys of shape (batch, heads, length, head_dim), and tables for all dimensions.

    ``elements`` counts queries and keys.
    """
    positions = max(1, elements // (2 * HEADS * HEAD_DIM))
    length = min(positions, MAX_LENGTH)
    shape = (positions // length, length, HEADS, HEAD_DIM)
    q, k = (torch.randn(shape, dtype=dtype, device=device).transpose(1, 2) for _ in range(2))
    angles = torch.rand(1, length, HEAD_DIM // 2, device=device)
    return [q, k, *(torch.cat([table, table], -1).to(dtype) for table in (angles.cos(), angles.sin()))]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def _rotate_back(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = (g.float() * sin[:, None]).chunk(2, -1)
    return (g.float() * cos[:, None] + torch.cat([second, -first], -1)).to(g.dtype)


def _plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _ours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dq: Tensor, dk: Tensor) -> list[Tensor | None]:
    if kernels_available(q):
        return _launched(q, k, cos, sin, dq, dk)
    return [*_plain(q, k, cos, sin), *(_rotate_back(g, cos, sin) for g in (dq, dk))]


def _launched(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dq: Tensor, dk: Tensor) -> list[Tensor | None]:
    return [*launch_rotate_half(q, k, cos, sin), *launch_rotate_half(dq, dk, cos, sin, True)]


CASES = [
    KernelCase(
        "rotary",
        inputs,
        differentiated=(0, 1),
        baseline=_plain,
        ours=_ours,
        launched=_launched,
        liger=lambda q, k, cos, sin: list(liger.rotary(q, k, cos, sin)),
    )
]
