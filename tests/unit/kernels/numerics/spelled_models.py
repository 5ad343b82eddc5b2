"""Parts of models as their authors spell them: norms, activations, dropout, biases of attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast import randomness  # noqa: F401, registers torch.ops.gpipe_fast
from gpipe_fast.randomness.random import make_key

COLS = 72
SHAPE = (2, 3, COLS)
_bernoulli = torch.ops.gpipe_fast.keyed_bernoulli


@dataclass(frozen=True)
class Part:
    """A part of a model.

    Attributes:
        function: takes tensors of the shapes.
        shapes: the shapes of its inputs; an input of integers is a key.
        left: the operators that remain in the graph besides launches, at most so many.
        launches: the number of launches of forward and gradients, at most.
    """

    function: Callable[..., Tensor | Sequence[Tensor]]
    shapes: tuple[tuple[int, ...] | None, ...]
    launches: int
    left: tuple[str, ...] = ()

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        """Returns random inputs; None among the shapes is a key."""
        return [make_key(7, 2) if s is None else (2 * torch.randn(s)).to(dtype) for s in self.shapes]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """`nn.RMSNorm`."""
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in transformers' Llama."""
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + 1e-6)
    return weight * x.to(dtype)


def t5_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in transformers' T5."""
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + 1e-6)
    return weight * x.to(weight.dtype)


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in transformers' Gemma."""
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (y * (1.0 + weight.float())).type_as(x)


def square_root_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm with a square root and a division."""
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6) * weight


def gpt2_gelu(x: Tensor) -> Tensor:
    """GELU in transformers' GPT-2."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def quick_gelu(x: Tensor) -> Tensor:
    """GELU in CLIP."""
    return x * torch.sigmoid(1.702 * x)


def silu_of_halves(packed: Tensor) -> Tensor:
    """SwiGLU of the halves of one product."""
    a, b = packed.chunk(2, dim=-1)
    return F.silu(a) * b


def spelled_silu(a: Tensor, b: Tensor) -> Tensor:
    """SwiGLU with a logistic function."""
    return a * torch.sigmoid(a) * b


def packed_silu(packed: Tensor) -> Tensor:
    """SwiGLU of two slices of one product, of which the second is the gate."""
    half = packed.shape[-1] // 2
    return packed[..., :half] * F.silu(packed[..., half:])


def layer_scale(x: Tensor, branch: Tensor, scale: Tensor) -> Tensor:
    """A residual connection with a factor per column."""
    return x + branch * scale


def drop_path(x: Tensor, branch: Tensor, key: Tensor) -> Tensor:
    """A residual connection that is left out for some samples."""
    kept = _bernoulli(key, 0, 3, [x.shape[0], 1, 1], 0.8, dtype=x.dtype, device=x.device)
    return x + branch * kept.div(0.8)


def alibi(scores: Tensor, bias: Tensor) -> Tensor:
    """Softmax of scores with a bias per head and key."""
    return torch.softmax(scores / 8.0 + bias, dim=-1)


def soft_cap(scores: Tensor) -> Tensor:
    """Limits scores as Gemma 2 does."""
    return 5.0 * torch.tanh(scores / 5.0)


def residual_norm(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A residual connection, and a LayerNorm of it."""
    total = x + branch
    return total, F.layer_norm(total, weight.shape, weight, bias)


def dropout_residual(x: Tensor, branch: Tensor, key: Tensor) -> Tensor:
    """A residual connection with dropout."""
    kept = _bernoulli(key, 1, 0, list(x.shape), 0.9, dtype=torch.bool, device=x.device)
    return x + branch.mul(kept).mul(1 / 0.9)


def norm_dropout(x: Tensor, weight: Tensor, bias: Tensor, key: Tensor) -> Tensor:
    """A LayerNorm with dropout, whose rows are no multiple of four."""
    kept = _bernoulli(key, 1, 0, list(x.shape), 0.75, dtype=torch.bool, device=x.device)
    return F.layer_norm(x, weight.shape, weight, bias).mul(kept).mul(1 / 0.75)


_ROW, _PACKED = (COLS,), (*SHAPE[:-1], 2 * COLS)
_SCORES = (2, 2, 3, 40)
# Gradients of slices are padded with zeros, and added.
_OF_SLICES = ("aten.add.Tensor", "aten.slice_backward.default", "aten.slice_backward.default")
PARTS: dict[str, Part] = {
    "RMSNorm": Part(rms_norm, (SHAPE, _ROW), 3),
    "Llama's RMSNorm": Part(llama_norm, (SHAPE, _ROW), 3),
    "T5's RMSNorm": Part(t5_norm, (SHAPE, _ROW), 3),
    "Gemma's RMSNorm": Part(gemma_norm, (SHAPE, _ROW), 3),
    "RMSNorm by a square root": Part(square_root_norm, (SHAPE, _ROW), 3),
    "GELU": Part(lambda x, bias: F.gelu(x + bias), (SHAPE, _ROW), 3),
    "GELU by tanh": Part(lambda x, b: F.gelu(x + b, approximate="tanh"), (SHAPE, _ROW), 3),
    "GPT-2's GELU": Part(gpt2_gelu, (SHAPE,), 2),
    "quick GELU": Part(quick_gelu, (SHAPE,), 2),
    "SwiGLU of halves": Part(silu_of_halves, (_PACKED,), 3, ("aten.cat.default",)),
    "SwiGLU by a sigmoid": Part(spelled_silu, (SHAPE, SHAPE), 2),
    "SwiGLU of slices": Part(packed_silu, (_PACKED,), 3, _OF_SLICES),
    "LayerScale": Part(layer_scale, (SHAPE, SHAPE, _ROW), 3),
    "DropPath": Part(drop_path, (SHAPE, SHAPE, None), 2, ("aten.mul.Tensor",)),
    "ALiBi": Part(alibi, (_SCORES, (2, 1, 40)), 3, ("aten.sum.dim_IntList",)),
    "soft-capping": Part(soft_cap, (_SCORES,), 2),
    "residual, LayerNorm": Part(residual_norm, (SHAPE, SHAPE, _ROW, _ROW), 3),
    "dropout, residual": Part(dropout_residual, (SHAPE, SHAPE, None), 2),
    "LayerNorm, dropout": Part(norm_dropout, ((3, 5, 37), (37,), (37,), None), 3),
}
