"""The kernels' only tolerance: an error against float64 of at most twice PyTorch's error, or one rounding."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gpipe_fast.fuse import accuracy

Results = Sequence[Tensor | None]


def check(ours: Results, eager: Results, exact_results: Results, roundings: int = 1) -> None:
    """Asserts that the error of each result is at most twice PyTorch's error, or one rounding.

    Args:
        ours: results of the kernels.
        eager: results of PyTorch's operators from the same tensors in the same dtypes.
        exact_results: results of the same operators in float64.
        roundings: the roundings that are allowed where PyTorch's error is smaller.
    """
    found = error_ratio(ours, eager, exact_results, roundings)
    assert all(share <= 1 for share in found), f"errors as fractions of the allowed errors: {found}"


def error_ratio(ours: Results, eager: Results, exact_results: Results, roundings: int = 1) -> list[float]:
    """Returns each result's error as a fraction of the allowed error: twice PyTorch's, or one rounding.

    Raises:
        AssertionError: results differ in number, shape or dtype.
    """
    shares = []
    for index, (own, other, exact) in enumerate(zip(ours, eager, exact_results, strict=True)):
        assert (own is None) == (other is None) == (exact is None), index
        if own is None or other is None or exact is None:
            continue
        assert (own.shape, own.dtype) == (other.shape, other.dtype), index
        if not own.numel():
            continue
        shares.append(accuracy.error_ratio(own, other, exact, roundings=roundings))
    return shares


def to_float64(tensors: Results) -> list[Tensor | None]:
    """Converts floating-point tensors to float64; leaves other dtypes unchanged."""
    return [t if t is None or not t.is_floating_point() else t.double() for t in tensors]
