"""A block of GPT-2 as transformers computes it: dropout, and GELU spelled out with tanh."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Conv1D(nn.Module):
    """A linear layer whose weight has the shape (inputs, outputs), as in OpenAI's GPT-2.

    Args:
        inputs: the width of the input.
        outputs: the width of the output.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.02)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.bias.shape[0])
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(shape)


def gelu_tanh(x: Tensor) -> Tensor:
    """Returns the approximation of GELU by tanh (arXiv 1606.08415), computed by separate operators."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Block(nn.Module):
    """A pre-norm Transformer block with causal attention.

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
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.attn_proj = Conv1D(width, 3 * width), Conv1D(width, width)
        self.c_fc, self.mlp_proj = Conv1D(width, 4 * width), Conv1D(4 * width, width)
        self.attn_resid, self.mlp_resid = nn.Dropout(dropout), nn.Dropout(dropout)

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        head_width = width // self.heads
        query, key, value = self.c_attn(x).split(width, dim=2)
        key, value, query = (
            p.view(batch, length, -1, head_width).transpose(1, 2) for p in (key, value, query)
        )
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=True,
            scale=head_width**-0.5,
        )
        attended = attended.transpose(1, 2).contiguous().reshape(batch, length, -1)
        result: Tensor = self.attn_resid(self.attn_proj(attended))
        return result

    def forward(self, x: Tensor) -> Tensor:
        x = self._attend(self.ln_1(x)) + x
        result: Tensor = x + self.mlp_resid(self.mlp_proj(gelu_tanh(self.c_fc(self.ln_2(x)))))
        return result
