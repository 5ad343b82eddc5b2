"""Rotary position embedding as transformers spells it, with tables of full width: forward and backward.

The halves of a head's dimensions are x1 and x2, and ``rotate_half(x)`` is (-x2, x1). The tables have an
element for every dimension, and their halves c1, c2 and s1, s2 need not be equal::

    y1 = x1 c1 - x2 s1      dx1 = dy1 c1 + dy2 s2
    y2 = x2 c2 + x1 s2      dx2 = dy2 c2 - dy1 s1

One program rotates a block of heads at a few positions, of q and, if given, of k, and reads the tables once
for both. Memory traffic per element of itemsize i: i bytes read and i written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels.launch import Config, cdiv, launch, next_power_of_2

# Configurations by the maximum size of half a head; the first entry that is wide enough applies.
CONFIGS = {
    32: Config({"POSITIONS": 4, "HEADS": 8}),
    64: Config({"POSITIONS": 2, "HEADS": 8}),
    1 << 62: Config({"POSITIONS": 1, "HEADS": 8}),
}


def choose(half: int) -> Config:
    """Returns the configuration for heads of ``2 * half`` dimensions."""
    return next(config for width, config in CONFIGS.items() if half <= width)


@triton.jit
def _rotate(p_x, p_y, mask, c1, c2, s1, s2, half, HALF: tl.constexpr):
    o_dims = tl.arange(0, HALF)[None, None, :]
    m_dims = mask & (o_dims < half)
    x1 = tl.load(p_x + o_dims, mask=m_dims, other=0.0).to(tl.float32)
    x2 = tl.load(p_x + half + o_dims, mask=m_dims, other=0.0).to(tl.float32)
    tl.store(p_y + o_dims, (x1 * c1 - x2 * s1).to(p_y.dtype.element_ty), mask=m_dims)
    tl.store(p_y + half + o_dims, (x2 * c2 + x1 * s2).to(p_y.dtype.element_ty), mask=m_dims)


@triton.jit
def _rotate_half(
    p_q, p_k, p_q_out, p_k_out, p_cos, p_sin, length, half, q_heads, k_heads,
    q_batch, q_head, q_position, k_batch, k_head, k_position,
    q_out_batch, q_out_head, q_out_position, k_out_batch, k_out_head, k_out_position,
    cos_batch, cos_position, sin_batch, sin_position,
    INVERSE: tl.constexpr, HAS_K: tl.constexpr, HALF: tl.constexpr,
    POSITIONS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    position_blocks = tl.cdiv(length, POSITIONS)
    batch = (tl.program_id(0) // position_blocks).to(tl.int64)
    o_positions = (tl.program_id(0) % position_blocks) * POSITIONS + tl.arange(0, POSITIONS)[:, None, None]
    m_positions = o_positions < length
    o_positions = o_positions.to(tl.int64)
    o_heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :, None]).to(tl.int64)

    o_dims = tl.arange(0, HALF)[None, None, :]
    m_table = m_positions & (o_dims < half)
    p_c = p_cos + batch * cos_batch + o_positions * cos_position + o_dims
    p_s = p_sin + batch * sin_batch + o_positions * sin_position + o_dims
    c1 = tl.load(p_c, mask=m_table, other=0.0).to(tl.float32)
    c2 = tl.load(p_c + half, mask=m_table, other=0.0).to(tl.float32)
    s1 = tl.load(p_s, mask=m_table, other=0.0).to(tl.float32)
    s2 = tl.load(p_s + half, mask=m_table, other=0.0).to(tl.float32)
    if INVERSE:
        s1, s2 = -s2, -s1

    p_x = p_q + batch * q_batch + o_positions * q_position + o_heads * q_head
    p_y = p_q_out + batch * q_out_batch + o_positions * q_out_position + o_heads * q_out_head
    _rotate(p_x, p_y, m_positions & (o_heads < q_heads), c1, c2, s1, s2, half, HALF)
    if HAS_K:
        p_x = p_k + batch * k_batch + o_positions * k_position + o_heads * k_head
        p_y = p_k_out + batch * k_out_batch + o_positions * k_out_position + o_heads * k_out_head
        _rotate(p_x, p_y, m_positions & (o_heads < k_heads), c1, c2, s1, s2, half, HALF)


def launch_rotate_half(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, inverse: bool = False, *,
    q_dtype: torch.dtype | None = None, k_dtype: torch.dtype | None = None, positions_first: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Computes ``x * cos + rotate_half(x) * sin`` of q and k, or the backward of their gradients.

    Args:
        q: a tensor of shape (batch, heads, length, head_dim), of any strides; in the backward its gradient.
        k: like q; the number of heads may differ. None to rotate q alone.
        cos: a table of shape (batch or 1, length, head_dim), of any strides.
        sin: like cos.
        inverse: whether to compute the backward.
        q_dtype: dtype of the first result. Default: the dtype of ``q * cos``.
        k_dtype: dtype of the second result. Default: the dtype of ``k * cos``.
        positions_first: whether ``result.transpose(1, 2)`` is to be contiguous.

    Returns:
        The results, by default in the layouts of q and k if these are dense and their last dimension has
        stride 1.
    """
    batch, q_heads, length, head_dim = q.shape
    half = head_dim // 2
    config = choose(half)
    cos, sin = (_unit_last_stride(t).expand(batch, length, head_dim) for t in (cos, sin))
    q, own_k = _unit_last_stride(q), None if k is None else _unit_last_stride(k)
    q_out = _allocate_like(q, q_dtype or torch.promote_types(q.dtype, cos.dtype), positions_first)
    k_out = None
    if own_k is not None:
        dtype = k_dtype or torch.promote_types(own_k.dtype, cos.dtype)
        k_out = _allocate_like(own_k, dtype, positions_first)
    # The kernel does not access an absent k; q is passed in its place.
    tensors = (q, q if own_k is None else own_k, q_out, q_out if k_out is None else k_out)
    heads = max(q_heads, tensors[1].shape[1])
    grid = (batch * cdiv(length, config.blocks["POSITIONS"]), cdiv(heads, config.blocks["HEADS"]))
    sizes = (length, half, q_heads, tensors[1].shape[1])
    strides = [stride for t in tensors for stride in t.stride()[:3]]
    strides += [*cos.stride()[:2], *sin.stride()[:2]]
    constants = {"INVERSE": inverse, "HAS_K": k is not None, "HALF": next_power_of_2(half)}
    launch(_rotate_half, grid if half else (0,), config, *tensors, cos, sin, *sizes, *strides, **constants)
    return q_out, k_out


def _unit_last_stride(x: Tensor) -> Tensor:
    """Returns x with a last dimension of stride 1. Copies only if necessary."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _allocate_like(x: Tensor, dtype: torch.dtype, positions_first: bool) -> Tensor:
    """Allocates a result in x's layout if its last dimension has stride 1, else contiguous."""
    if positions_first:
        _, heads, length, head_dim = x.shape
        strides = (length * heads * head_dim, head_dim, heads * head_dim, 1)
        return x.new_empty_strided(x.shape, strides, dtype=dtype)
    found = torch.empty_like(x, dtype=dtype)
    if found.stride(-1) == 1:
        return found
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
