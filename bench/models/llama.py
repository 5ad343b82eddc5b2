"""A block of Llama as transformers computes it: RMSNorm, rotary positions, grouped attention, SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root mean square normalization in fp32, spelled out by separate operators (arXiv 1910.07467).

    Args:
        width: the size of the last dimension.
        eps: is added to the mean of squares.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        dtype, x = x.dtype, x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    """Returns (-second half, first half) of the last dimension."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((-second, first), dim=-1)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Applies rotary position embeddings (arXiv 2104.09864) to queries and keys.

    Args:
        query: queries of shape (batch, heads, length, head width).
        key: keys; their number of heads may differ.
        cos: cosines of shape (batch or 1, length, head width).
        sin: sines, with the same shape.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return query * cos + rotate_half(query) * sin, key * cos + rotate_half(key) * sin


class Block(nn.Module):
    """A pre-norm Transformer block with causal attention and without biases.

    Args:
        width: the width of the residual stream, divisible by ``heads``.
        heads: the number of attention heads.
        kv_heads: the number of heads of keys and values, a divisor of ``heads``.
        hidden: the width between the gated linear layers.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        kv_width = kv_heads * self.head_width
        self.norm_1, self.norm_2 = RMSNorm(width), RMSNorm(width)
        self.q_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(width, kv_width, bias=False) for _ in range(2))
        self.gate_proj, self.up_proj = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        split = (*x.shape[:-1], -1, self.head_width)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (projection(x).view(split).transpose(1, 2) for projection in projections)
        query, key = rotate(query, key, cos, sin)
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=self.head_width**-0.5,
            enable_gqa=self.heads != self.kv_heads,
        )
        attended = attended.transpose(1, 2).contiguous().reshape(*x.shape[:-1], -1)
        result: Tensor = self.o_proj(attended)
        return result

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the new hidden states, and the positions for the next block.

        Args:
            inputs: hidden states of shape (batch, length, width), and cosines and sines of shape
                (batch or 1, length, head width).
        """
        x, cos, sin = inputs
        x = x + self._attend(self.norm_1(x), cos, sin)
        y = self.norm_2(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y)), cos, sin


class _Positions(nn.Module):
    """Adds the cosines and sines of rotary positions to hidden states of shape (batch, length, width)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_width: int, length: int) -> None:
        super().__init__()
        rates = 10_000.0 ** -(torch.arange(0, head_width, 2) / head_width)
        angles = torch.outer(torch.arange(length), rates).repeat(1, 2)[None]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, self.cos, self.sin


class _Hidden(nn.Module):
    """Returns the hidden states without the positions."""

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return inputs[0]


def llama(layers: int, width: int, heads: int, kv_heads: int, hidden: int, length: int) -> nn.Sequential:
    """Returns blocks of Llama between hidden states of shape (batch, length, width).

    Args:
        layers: the number of blocks.
        width: as for `Block`, like the next three.
        heads: the number of attention heads.
        kv_heads: the number of heads of keys and values.
        hidden: the width between the gated linear layers.
        length: the length of a sequence.
    """
    blocks = (Block(width, heads, kv_heads, hidden) for _ in range(layers))
    return nn.Sequential(_Positions(width // heads, length), *blocks, _Hidden())
