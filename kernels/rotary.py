"""Rotary position embedding of queries and keys, forward and backward, in place and out of place.

Position m rotates the i-th pair of a head's dimensions by the angle m theta_i, theta_i = base^(-2 i / d) for
d rotary dimensions (RoFormer, arXiv 2104.09864); the backward rotates the gradients by the opposite angle::

    y1 = x1 cos - x2 sin      dx1 = dy1 cos + dy2 sin      pairs are (i, i + d / 2), as in GPT-NeoX,
    y2 = x2 cos + x1 sin      dx2 = dy2 cos - dy1 sin      or (2 i, 2 i + 1), interleaved, as in the paper

Dimensions from d on are copied unchanged. One program rotates a block of heads of q and the same block of k
at a few positions, and reads the tables once for both. Memory traffic per element of itemsize i: i bytes read
and i written; in place only the first d dimensions move. The tables take 8 bytes (fp32) per pair, for each
position and block of heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels import reference
from gpipe_fast.kernels.launch import (
    Config,
    Variant,
    cdiv,
    launch,
    next_power_of_2,
    tuned,
    uses_kernels,
)

# Configurations by the maximum number of rotated pairs; the first entry that is wide enough applies. In bf16
# a thread loads 16 bytes at once.
CONFIGS = {
    32: Config({"POSITIONS": 4, "HEADS": 8}),
    64: Config({"POSITIONS": 2, "HEADS": 8}),
    1 << 62: Config({"POSITIONS": 1, "HEADS": 8}),
}


def choose(num_pairs: int) -> Config:
    """Returns the configuration for heads with ``num_pairs`` rotated pairs."""
    widest = next(width for width in CONFIGS if num_pairs <= width)
    return tuned("rotary", f"pairs<={widest}", CONFIGS[widest])


@triton.jit
def _rotate(
    p_x, p_y, mask, b_cos, b_sin,
    INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotates the heads at the pointers. The tables have one head, which all heads share."""
    if INTERLEAVED:
        o_dims = tl.arange(0, 2 * PAIRS_BLOCK)[None, None, :]
        m_dims = mask & (o_dims < 2 * PAIRS)
        x = tl.load(p_x + o_dims, mask=m_dims, other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], PAIRS_BLOCK, 2]))
        y = tl.reshape(tl.join(x1 * b_cos - x2 * b_sin, x2 * b_cos + x1 * b_sin), x.shape)
        tl.store(p_y + o_dims, y.to(p_y.dtype.element_ty), mask=m_dims)
    else:
        o_dims = tl.arange(0, PAIRS_BLOCK)[None, None, :]
        m_dims = mask & (o_dims < PAIRS)
        x1 = tl.load(p_x + o_dims, mask=m_dims, other=0.0).to(tl.float32)
        x2 = tl.load(p_x + PAIRS + o_dims, mask=m_dims, other=0.0).to(tl.float32)
        y1, y2 = x1 * b_cos - x2 * b_sin, x2 * b_cos + x1 * b_sin
        tl.store(p_y + o_dims, y1.to(p_y.dtype.element_ty), mask=m_dims)
        tl.store(p_y + PAIRS + o_dims, y2.to(p_y.dtype.element_ty), mask=m_dims)
    if REST > 0:
        o_rest = 2 * PAIRS + tl.arange(0, REST_BLOCK)[None, None, :]
        m_rest = mask & (o_rest < 2 * PAIRS + REST)
        tl.store(p_y + o_rest, tl.load(p_x + o_rest, mask=m_rest), mask=m_rest)


@triton.jit
def _rotary(
    p_q, p_k, p_q_out, p_k_out, p_cos, p_sin, sign, length, q_heads, k_heads,
    q_batch, q_position, q_head, k_batch, k_position, k_head,
    q_out_batch, q_out_position, q_out_head, k_out_batch, k_out_position, k_out_head,
    table_batch, table_position,
    INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, POSITIONS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    position_blocks = tl.cdiv(length, POSITIONS)
    batch = (tl.program_id(0) // position_blocks).to(tl.int64)
    o_positions = (tl.program_id(0) % position_blocks) * POSITIONS + tl.arange(0, POSITIONS)[:, None, None]
    m_positions = o_positions < length
    o_positions = o_positions.to(tl.int64)
    o_heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :, None]

    o_pairs = tl.arange(0, PAIRS_BLOCK)[None, None, :]
    o_table = batch * table_batch + o_positions * table_position + o_pairs
    m_table = m_positions & (o_pairs < PAIRS)
    b_cos = tl.load(p_cos + o_table, mask=m_table, other=0.0).to(tl.float32)
    b_sin = sign * tl.load(p_sin + o_table, mask=m_table, other=0.0).to(tl.float32)

    o_heads = o_heads.to(tl.int64)
    p_x = p_q + batch * q_batch + o_positions * q_position + o_heads * q_head
    p_y = p_q_out + batch * q_out_batch + o_positions * q_out_position + o_heads * q_out_head
    mask = m_positions & (o_heads < q_heads)
    _rotate(p_x, p_y, mask, b_cos, b_sin, INTERLEAVED, PAIRS, REST, PAIRS_BLOCK, REST_BLOCK)
    p_x = p_k + batch * k_batch + o_positions * k_position + o_heads * k_head
    p_y = p_k_out + batch * k_out_batch + o_positions * k_out_position + o_heads * k_out_head
    mask = m_positions & (o_heads < k_heads)
    _rotate(p_x, p_y, mask, b_cos, b_sin, INTERLEAVED, PAIRS, REST, PAIRS_BLOCK, REST_BLOCK)


def _launch(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, cos: Tensor, sin: Tensor,
    interleaved: bool, inverse: bool, rest: int,
) -> None:  # fmt: skip
    """Rotates q and k into outputs (may be q and k) and copies ``rest`` dimensions; last strides are 1."""
    batch, length, q_heads, _ = q.shape
    num_pairs = int(cos.shape[-1])
    config = choose(num_pairs)
    cos, sin = (table.contiguous().expand(batch, length, num_pairs) for table in (cos, sin))
    tensors = (q, k, q_out, k_out)
    heads = max(q_heads, k.shape[2])
    grid = (batch * cdiv(length, config.blocks["POSITIONS"]), cdiv(heads, config.blocks["HEADS"]))
    launch(
        _rotary, grid, config, *tensors, cos, sin, -1.0 if inverse else 1.0, length, q_heads, k.shape[2],
        *(stride for tensor in tensors for stride in tensor.stride()[:3]), *cos.stride()[:2],
        INTERLEAVED=interleaved, PAIRS=num_pairs, REST=rest,
        PAIRS_BLOCK=next_power_of_2(num_pairs), REST_BLOCK=next_power_of_2(max(rest, 1)),
    )  # fmt: skip


def _unit_last_stride(x: Tensor) -> Tensor:
    """Returns x with a last dimension of stride 1. Copies only if necessary."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _allocate_like(x: Tensor) -> Tensor:
    """Allocates a result in x's layout if its last dimension has stride 1, else contiguous."""
    found = torch.empty_like(x)
    return found if found.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def launch_forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    """Returns q and k rotated, by the opposite angles (for the backward) if ``inverse``."""
    q, k = _unit_last_stride(q), _unit_last_stride(k)
    q_out, k_out = _allocate_like(q), _allocate_like(k)
    rest = int(q.shape[-1] - 2 * cos.shape[-1])
    _launch(q, k, q_out, k_out, cos, sin, interleaved, inverse, rest)
    return q_out, k_out


def launch_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> None:
    """Rotates q and k in place."""
    own_q, own_k = _unit_last_stride(q), _unit_last_stride(k)
    _launch(own_q, own_k, own_q, own_k, cos, sin, interleaved, inverse, 0)
    for x, own in ((q, own_q), (k, own_k)):
        if own is not x:
            x.copy_(own)


def variants() -> dict[str, Variant]:
    """Returns every configuration as a variant. In place REST is 0; the backward differs only in a sign."""
    found = {}
    tensors = ("p_q", "p_k", "p_q_out", "p_k_out")
    strides = [f"{x[2:]}_{dim}" for x in (*tensors, "p_table") for dim in ("batch", "position", "head")][:-1]
    counts = dict.fromkeys(("length", "q_heads", "k_heads", *strides), "i32")
    for dtype in ("fp32", "bf16"):
        types = dict.fromkeys(tensors, f"*{dtype}") | {"p_cos": "*fp32", "p_sin": "*fp32", "sign": "fp32"}
        for interleaved in (False, True):
            for pairs, rest in ((32, 0), (64, 0), (128, 0), (32, 64)):
                config = CONFIGS[pairs if pairs in CONFIGS else 1 << 62]
                constants = {"INTERLEAVED": interleaved, "PAIRS": pairs, "REST": rest}
                constants |= {"PAIRS_BLOCK": pairs, "REST_BLOCK": max(rest, 1)}
                pairing = "interleaved" if interleaved else "halves"
                name = f"rotary forward or backward, {pairing} {dtype}, {2 * pairs} of {2 * pairs + rest}"
                aligned = (*tensors, "p_cos", "p_sin", *strides)
                found[f"{name}, {config}"] = Variant(_rotary, types | counts, constants, config, aligned)
    return found


@torch.library.triton_op("gpipe_fast::rotary", mutates_args={})
def _rotary_op(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    rotate = launch_forward if uses_kernels(q, k) else reference.rotary
    return rotate(q, k, cos, sin, interleaved, inverse)


@torch.library.triton_op("gpipe_fast::rotary_", mutates_args={"q", "k"})
def _rotary_in_place_op(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> None:
    rotate = launch_in_place if uses_kernels(q, k) else reference.rotary_
    rotate(q, k, cos, sin, interleaved, inverse)


def _setup(ctx, inputs, output):
    _, _, cos, sin, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx, dq, dk):
    """Rotates out of place: autograd may pass the same gradient to other nodes too, as after a sum."""
    dq, dk = _rotary_op(dq, dk, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse)
    return dq, dk, None, None, None, None


_rotary_op.register_autograd(_differentiate, setup_context=_setup)


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Applies rotary position embedding to queries and keys. The results have the layouts of the inputs.

    Saves only the tables: the backward rotates the gradients back, and is itself differentiable.

    Args:
        q: a tensor of shape (batch, length, heads, head_dim); fp32, fp16 or bf16, any strides. Arithmetic is
            in fp32.
        k: like ``q``; the number of heads may differ.
        cos: a table of shape (length, rotary_dim / 2), or (batch, length, rotary_dim / 2) if each sequence
            has its own positions. rotary_dim is at most head_dim; dimensions after rotary_dim are copied
            unchanged. The table gets no gradient.
        sin: like ``cos``.
        interleaved: whether pairs are (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2).

    Returns:
        The rotated q and k, in the same shapes and dtypes.

    Raises:
        ValueError: shapes or dtypes do not match, or a table requires a gradient.
    """
    _check(q, k, cos, sin)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError(
            "the tables get no gradient, but cos or sin requires one; pass cos.detach(), sin.detach()"
        )
    rotated: tuple[Tensor, Tensor] = _rotary_op(q, k, cos, sin, interleaved, False)
    return rotated


def rotary_(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Applies `rotary` in place, outside of autograd. q and k must not overlap.

    Args:
        q: as in `rotary`; written to.
        k: as in `rotary`; written to.
        cos: as in `rotary`.
        sin: as in `rotary`.
        interleaved: as in `rotary`.

    Returns:
        The tensors q and k.

    Raises:
        ValueError: as in `rotary`; or q or k requires a gradient or has overlapping elements.
    """
    return _in_place(q, k, cos, sin, interleaved, False)


def rotary_backward_(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Computes the backward of `rotary` in place. The caller must own the gradients exclusively.

    Args:
        dq: the gradient of the rotated q; written to.
        dk: the gradient of the rotated k; written to.
        cos: as in `rotary`.
        sin: as in `rotary`.
        interleaved: as in `rotary`.

    Returns:
        The tensors dq and dk, now the gradients of q and k.

    Raises:
        ValueError: as in `rotary_`.
    """
    return _in_place(dq, dk, cos, sin, interleaved, True)


def rotary_tables(positions: Tensor, rotary_dim: int, *, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of ``m base^(-2 i / rotary_dim)``; large angles m theta_i need fp64.

    Args:
        positions: integers or floats of shape (length) or (batch, length).
        rotary_dim: the number of rotated dimensions of a head; even.
        base: the base of theta_i, 10000 in the paper.

    Returns:
        Both tables in fp32, on the device and in the shape of the positions with a last dimension of
        rotary_dim / 2 added.

    Raises:
        ValueError: rotary_dim is odd or not positive.
    """
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even and positive, got {rotary_dim}")
    pairs = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=positions.device)
    angles = positions.double()[..., None] * base ** (-pairs / rotary_dim)
    return angles.cos().float(), angles.sin().float()


def _in_place(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    _check(q, k, cos, sin)
    for x in (q, k):
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"tensors rotated in place must not require a gradient, got one of shape {list(x.shape)}"
                "; call rotary, or disable gradients with torch.no_grad()"
            )
        if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
            raise ValueError(
                f"elements overlap in memory: shape {list(x.shape)}, strides {list(x.stride())}; pass a "
                "contiguous copy, or use the functions that return new tensors"
            )
    _rotary_in_place_op(q, k, cos, sin, interleaved, inverse)
    return q, k


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    shapes = ", ".join(str(list(tensor.shape)) for tensor in (q, k, cos, sin))
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must be (batch, length, heads, head_dim), got q, k, cos, sin of {shapes}")
    fits = cos.shape == sin.shape and cos.dim() in (2, 3) and cos.shape[-2] == q.shape[1]
    if not fits or (cos.dim() == 3 and cos.shape[0] not in (1, q.shape[0])):
        raise ValueError(f"tables must be ([batch,] length, rotary_dim / 2), got q, k, cos, sin of {shapes}")
    if not 0 < 2 * cos.shape[-1] <= q.shape[3]:
        raise ValueError(f"rotary_dim must be from 2 to head_dim, got q, k, cos, sin of {shapes}")
    if not all(tensor.is_floating_point() for tensor in (q, k, cos, sin)):
        raise ValueError(
            "q, k, cos and sin must be floating-point tensors, "
            f"got {q.dtype}, {k.dtype}, {cos.dtype}, {sin.dtype}"
        )
    if len({tensor.device for tensor in (q, k, cos, sin)}) > 1:
        raise ValueError(
            f"q, k, cos and sin must be on one device, got {q.device}, {k.device}, {cos.device}, {sin.device}"
        )
