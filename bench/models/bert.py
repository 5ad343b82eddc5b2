"""A block of BERT as transformers computes it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A post-norm Transformer block with dropout and GELU (arXiv 1810.04805).

    Args:
        width: the width of the residual stream, divisible by ``heads``.
        heads: the number of attention heads.
        dropout: the probability of dropout in both residual branches.
        attention_dropout: the probability of dropout in the attention matrix. On a GPU gpipe_fast then
            computes the attention with separate operators.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.1, attention_dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.attention_dropout = heads, attention_dropout
        self.query, self.key, self.value, self.attention_dense = (nn.Linear(width, width) for _ in range(4))
        self.intermediate, self.dense = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.dropout_1, self.dropout_2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def _attend(self, x: Tensor) -> Tensor:
        width = x.shape[-1] // self.heads
        split = (*x.shape[:-1], -1, width)
        projections = (self.query, self.key, self.value)
        query, key, value = (projection(x).view(split).transpose(1, 2) for projection in projections)
        dropout = self.attention_dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=width**-0.5)
        return attended.transpose(1, 2).contiguous().reshape(*x.shape[:-1], -1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_1(self.dropout_1(self.attention_dense(self._attend(x))) + x)
        result: Tensor = self.norm_2(self.dropout_2(self.dense(F.gelu(self.intermediate(x)))) + x)
        return result
