"""Kernels against PyTorch's own operators, both measured by what float64 gives; where, and in which dtypes.

Where: on the device that GPIPE_FAST_KERNELS_ON names: 'cuda', or 'cpu', in Triton's interpreter with
TRITON_INTERPRET=1 and else by the references. Without it, which operators/test_families.py sets, nothing is
collected.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from bench.accuracy import Results, check, doubles
from gpipe_fast.kernels.launch import INTERPRETED

__all__ = ["DEVICE", "DTYPES", "check", "doubles", "every_dtype", "every_width", "needs_kernels", "strided"]


# What tests allocate on; None where they are not collected.
DEVICE = os.environ.get("GPIPE_FAST_KERNELS_ON")
# Columns of a row: one, below and above a warp, no power of two, and beyond every block.
COLUMNS = (1, 63, 100, 1000, 4097)
# The interpreter's bf16 arithmetic is wrong.
DTYPES = (torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16]))

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_width = pytest.mark.parametrize("cols", COLUMNS)
needs_kernels = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="the references are tested")


def with_gradients(
    function: Callable[..., Tensor | Sequence[Tensor]], inputs: Results, gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    """What a function returns, and the gradients of its floating-point inputs."""
    leaves = [t if t is None or not t.is_floating_point() else t.detach().requires_grad_() for t in inputs]
    results = function(*leaves)
    outputs = [results] if isinstance(results, Tensor) else list(results)
    sources = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = torch.autograd.grad(
        outputs, sources, [g.to(o.dtype) for g, o in zip(gradients, outputs, strict=True)]
    )
    return [*(output.detach() for output in outputs), *found]


def strided(tensor: Tensor) -> Tensor:
    """The same elements, not contiguous: every second column of twice as many."""
    return torch.stack([tensor, torch.full_like(tensor, float("nan"))], dim=-1).flatten(-2)[..., ::2]
