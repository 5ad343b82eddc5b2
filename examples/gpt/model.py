"""The demo's model: a byte-level GPT in plain PyTorch, an nn.Sequential with one layer per block."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # a token is a byte


class Embed(nn.Module):
    """Token plus position embedding: (batch, length), int64, to (batch, length, width)."""

    def __init__(self, width: int, length: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.empty(length, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeds windows of at most ``length`` tokens."""
        embedded: Tensor = self.dropout(self.token(tokens) + self.position[: tokens.shape[1]])
        return embedded


class Attention(nn.Module):
    """Causal self-attention over (batch, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Lets every position attend to itself and to the positions before it."""
        batch, length, width = x.shape
        split = self.queries_keys_values(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


class Block(nn.Module):
    """A pre-norm Transformer block over (batch, length, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Adds the outputs of the attention branch and then of the MLP branch to ``x``."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        result: Tensor = x + self.dropout(self.mlp(self.norm_mlp(x)))
        return result


def gpt(width: int, layers: int, heads: int, length: int, dropout: float = 0.0) -> nn.Sequential:
    """Returns the model: maps tokens (batch, length), int64, to next-token logits (batch, length, 256).

    Args:
        width: the size of a token's vector, a multiple of ``heads``.
        layers: the number of blocks; the Sequential also has an embedding and a head.
        heads: the number of attention heads.
        length: the maximum window length.
        dropout: the dropout probability, at the end of the embedding and of every branch.
    """
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False))
    blocks = [(f"block{i}", Block(width, heads, dropout)) for i in range(layers)]
    model = nn.Sequential(OrderedDict([("embed", Embed(width, length, dropout)), *blocks, ("head", head)]))
    _initialise(model, layers)
    return model


def _initialise(model: nn.Sequential, layers: int) -> None:
    """Initialises weights like GPT-2: normal, and smaller where a branch joins the residual stream."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            joins = name.endswith(("attention.out.weight", "mlp.2.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if joins else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
