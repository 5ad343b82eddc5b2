"""Adapters from Liger-Kernel's functions to `bench.gpu.case.Case.liger`, checked with version 0.8.5.

Each function imports Liger-Kernel when it is called. Some overwrite their inputs or gradients.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from torch import Tensor


def available() -> bool:
    """Returns whether Liger-Kernel is installed (`make wheelhouse` collects it for an offline machine)."""
    return importlib.util.find_spec("liger_kernel") is not None


def cross_entropy(logits: Tensor, target: Tensor) -> Any:
    """Returns the mean loss over rows."""
    from liger_kernel.ops import LigerCrossEntropyFunction

    return LigerCrossEntropyFunction.apply(logits, target, None)[0]


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Any:
    """Returns the mean loss over rows, without a bias."""
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    return LigerFusedLinearCrossEntropyFunction.apply(x, weight, target)[0]


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Rotates pairs (i, i + head_dim / 2) of q and k, of shape (batch, heads, length, head_dim).

    The fastest memory layout is (batch, length, heads, head_dim). Cosines and sines are of shape (1, length,
    head_dim).
    """
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    return liger_rotary_pos_emb(q, k, cos, sin)
