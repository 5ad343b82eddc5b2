"""GPT: Transformer blocks between embeddings and a head, in the sizes of GPT-2 and larger."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm Transformer block with causal attention.

    Args:
        width: the width of the residual stream, divisible by ``heads``.
        heads: the number of attention heads.
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


class Embedding(nn.Module):
    """The sum of token and position embeddings.

    Args:
        vocab: the number of tokens.
        context: the number of positions.
        width: the width of the residual stream.
    """

    def __init__(self, vocab: int, context: int, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        result: Tensor = self.token(tokens) + self.position(positions)
        return result


def blocks(count: int, width: int = 256, heads: int = 8) -> list[nn.Module]:
    """Returns ``count`` equal Transformer blocks."""
    return [Block(width, heads) for _ in range(count)]


def gpt(
    layers: int, width: int, heads: int, vocab: int = 50257, context: int = 1024, tied: bool = False
) -> nn.Sequential:
    """Builds GPT-2 without dropout.

    See Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".

    The model takes tokens of shape (batch, length) and returns logits of shape (batch, length, vocab). It has
    ``layers * (12 * width**2 + 13 * width) + (2 * vocab + context + 2) * width`` parameters, and ``vocab *
    width`` fewer if tied: (12, 768, 12) has 163.0 M, and 124.4 M if tied, like GPT-2 small.

    Args:
        layers: the number of blocks. The sequence has three more layers.
        width: the width of the residual stream, divisible by ``heads``.
        heads: the number of attention heads.
        vocab: the number of tokens.
        context: the maximum sequence length.
        tied: whether the head and the token embedding share their weight.
    """
    embedding = Embedding(vocab, context, width)
    head = nn.Linear(width, vocab, bias=False)
    if tied:
        head.weight = embedding.token.weight
    named = {f"block{i + 1}": block for i, block in enumerate(blocks(layers, width, heads))}
    return nn.Sequential(
        OrderedDict({"embedding": embedding, **named, "norm": nn.LayerNorm(width), "head": head})
    )
