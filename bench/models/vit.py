"""A block of a Vision Transformer as torchvision computes it."""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm Transformer block with `nn.MultiheadAttention` and GELU.

    Args:
        width: the width of the residual stream, divisible by ``heads``.
        heads: the number of attention heads.
        dropout: the probability of dropout after each linear layer of the residual branches.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        x = self.dropout(y) + x
        result: Tensor = x + self.mlp(self.ln_2(x))
        return result
