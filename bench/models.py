"""The models that the benchmarks train."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm Transformer block with causal attention.

    Args:
        width: of the residual stream.
        heads: attention heads; they divide the width.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return result


def mlp(width: int = 64) -> list[nn.Module]:
    """One stage of the overhead benchmark: 2 x (Linear, ReLU)."""
    return [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]


def blocks(count: int, width: int = 256, heads: int = 8) -> list[nn.Module]:
    """``count`` equal Transformer blocks."""
    return [Block(width, heads) for _ in range(count)]
