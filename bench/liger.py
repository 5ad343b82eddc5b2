"""Adapters from Liger-Kernel's functions to `bench.case.Case.liger`, checked with version 0.8.5.

Each function imports Liger-Kernel when it is called. Some overwrite their inputs or gradients.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from torch import Tensor


def available() -> bool:
    """Returns whether Liger-Kernel is installed (`make wheelhouse` collects it for an offline machine)."""
    return importlib.util.find_spec("liger_kernel") is not None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Any:
    from liger_kernel.ops import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Any:
    """Computes RMSNorm in fp32 throughout ('gemma' casting mode), out of place."""
    from liger_kernel.ops import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "gemma", False)


def residual_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Any:
    """Returns the normalised sum, and the sum."""
    from liger_kernel.ops import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, 0.0, "gemma", False)


def swiglu(gate: Tensor, up: Tensor) -> Any:
    from liger_kernel.ops import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)


def geglu_tanh(gate: Tensor, up: Tensor) -> Any:
    from liger_kernel.ops import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(gate, up)


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
