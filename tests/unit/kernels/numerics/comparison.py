"""Helpers that compare kernels with PyTorch's operators, both measured against float64.

The environment variable GPIPE_FAST_KERNELS_ON names the device: 'cuda', or 'cpu' (the default). On the CPU,
kernels run in Triton's interpreter if TRITON_INTERPRET=1; otherwise the reference implementations run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from gpipe_fast.kernels.launch import INTERPRETED
from tests.unit.kernels.accuracy import Results, check, to_float64

__all__ = [
    "DEVICE",
    "DTYPES",
    "check",
    "every_dtype",
    "every_width",
    "needs_kernels",
    "noncontiguous",
    "outputs_and_gradients",
    "to_float64",
]


# The device on which tests allocate.
DEVICE = os.environ.get("GPIPE_FAST_KERNELS_ON", "cpu")
# Numbers of columns: 1, small and large numbers that are not powers of two, and one more than a power of two.
COLUMNS = (1, 63, 100, 1000, 4097)
# The interpreter has no bf16 of its own; tests/fake_cuda/bfloat16.py computes it in fp32.
DTYPES = (torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16]))

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_width = pytest.mark.parametrize("cols", COLUMNS)
needs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="this run tests the reference implementations"
)


def outputs_and_gradients(
    function: Callable[..., Tensor | Sequence[Tensor]], inputs: Results, gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    """Returns the outputs of a function, and the gradients of its floating-point inputs."""
    leaves = [t if t is None or not t.is_floating_point() else t.detach().requires_grad_() for t in inputs]
    results = function(*leaves)
    outputs = [results] if isinstance(results, Tensor) else list(results)
    sources = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = torch.autograd.grad(
        outputs, sources, [g.to(o.dtype) for g, o in zip(gradients, outputs, strict=True)]
    )
    return [*(output.detach() for output in outputs), *found]


def noncontiguous(tensor: Tensor) -> Tensor:
    """Returns a view with the same elements: every second column of a tensor with NaN in the others."""
    return torch.stack([tensor, torch.full_like(tensor, float("nan"))], dim=-1).flatten(-2)[..., ::2]
