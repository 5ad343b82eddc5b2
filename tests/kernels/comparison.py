"""Kernels against PyTorch's own operators, both measured by what float64 gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

# Columns of a row: one, below and above a warp, no power of two, and beyond every block.
COLUMNS = (1, 63, 100, 1000, 4097)
# In the interpreter; bf16 is tested on a GPU, since its arithmetic is wrong there.
DTYPES = (torch.float32, torch.float16)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_width = pytest.mark.parametrize("cols", COLUMNS)

Results = Sequence[Tensor | None]


def check(ours: Results, eager: Results, truth: Results) -> None:
    """Asserts that each result is at most twice as far from the truth as PyTorch's, or one rounding.

    Args:
        ours: of the kernels.
        eager: of PyTorch's operators, from the same tensors in the same dtypes.
        truth: of the same operators in float64.
    """
    for index, (own, other, exact) in enumerate(zip(ours, eager, truth, strict=True)):
        assert (own is None) == (other is None) == (exact is None), index
        if own is None or other is None or exact is None:
            continue
        assert (own.shape, own.dtype) == (other.shape, other.dtype), index
        if not own.numel():
            continue
        off, allowed = _error(own, exact), _error(other, exact)
        rounding = torch.finfo(own.dtype).eps * float(exact.abs().max())
        assert off <= max(2 * allowed, rounding), (index, off, allowed, rounding)


def _error(found: Tensor, exact: Tensor) -> float:
    difference = (found.double() - exact).abs()
    return float(difference.nan_to_num(nan=float("inf")).max())


def doubles(tensors: Results) -> list[Tensor | None]:
    """The same in float64; what is no floating-point number stays."""
    return [t if t is None or not t.is_floating_point() else t.double() for t in tensors]


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
