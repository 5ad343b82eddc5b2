"""Kernels against PyTorch's own operators, both measured by what float64 gives; where, and in which dtypes.

Where: on the device that GPIPE_FAST_KERNELS_ON names: 'cuda', or 'cpu', which is the default, in Triton's
interpreter with TRITON_INTERPRET=1 and else by the references.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from bench.accuracy import Results, check, doubles
from gpipe_fast.kernels import Draw, reference
from gpipe_fast.kernels.launch import INTERPRETED

__all__ = [
    "DEVICE",
    "DTYPES",
    "check",
    "doubles",
    "dropped",
    "every_dtype",
    "every_width",
    "needs_kernels",
    "rows_beyond",
    "strided",
    "with_gradients",
]


# What tests allocate on.
DEVICE = os.environ.get("GPIPE_FAST_KERNELS_ON", "cpu")
# Columns of a row: one, below and above a warp, no power of two, and beyond every block.
COLUMNS = (1, 63, 100, 1000, 4097)
# The interpreter's bf16 arithmetic is wrong.
DTYPES = (torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16]))

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_width = pytest.mark.parametrize("cols", COLUMNS)
needs_kernels = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="the references are tested")


def rows_beyond(block_rows: int, cols: int) -> tuple[int, int, int]:
    """A shape of more rows than a block has, and no multiple of a block's; few in the interpreter.

    An operation of one program takes it about 0.1 ms, whatever the size of a block.
    """
    return (3, 3 if INTERPRETED and block_rows < 9 else 19, cols)


def dropped(a: Tensor, draw: Draw | None) -> Tensor:
    """PyTorch's own dropout, with the mask of gpipe_fast's keyed op; without a draw, what is given."""
    if draw is None:
        return a
    return a * reference.keep(a.shape, *draw) * (0.0 if draw.p == 1.0 else 1 / (1 - draw.p))


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
