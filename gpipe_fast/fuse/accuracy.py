"""The comparison with float64: an error of fused kernels as a fraction of the allowed one."""

from __future__ import annotations

import torch
from torch import Tensor


def error_ratio(
    found: Tensor,
    expected: Tensor,
    exact: Tensor,
    perturbed: Tensor | None = None,
    *,
    factor: float = 2.0,
    roundings: float = 2.0,
) -> float:
    """Returns an error as a fraction of the allowed one; infinite if the result is wrong whatever is allowed.

    Allowed is the largest of `factor` times PyTorch's own error, `roundings` of the largest element, and four
    times the change that a rounding of the inputs makes, which is all that is left where a result cancels.
    Elements that overflow in PyTorch's result are not compared. A result of the same bits as PyTorch's is
    right.

    Args:
        found: the result of fused kernels.
        expected: the result of PyTorch's operators in the same dtypes.
        exact: the result of PyTorch's operators in float64.
        perturbed: the same, of inputs that differ by one rounding; None if that is not known.
        factor: the allowed multiple of PyTorch's error.
        roundings: the allowed number of roundings.
    """
    if not found.is_floating_point():
        return 0.0 if torch.equal(found, expected) else float("inf")
    compared = expected.isfinite() & exact.isfinite()
    if perturbed is not None:
        compared &= perturbed.isfinite()
    if torch.equal(found[compared], expected[compared]):
        return 0.0
    exact = exact[compared]
    ours, theirs = ((t[compared].double() - exact).abs().max() for t in (found, expected))
    allowed = [factor * theirs, roundings * torch.finfo(found.dtype).eps * exact.abs().max()]
    if perturbed is not None:
        allowed.append(4 * (perturbed[compared] - exact).abs().max())
    error, limit = torch.stack([ours, torch.stack(allowed).max()]).tolist()  # one copy to the host
    return error / limit if limit and error < float("inf") else float("inf")  # also for NaN
