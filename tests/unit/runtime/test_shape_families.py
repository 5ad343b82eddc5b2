"""Shape families: everything about inputs and gradients except their sizes."""

from __future__ import annotations

import pytest
import torch

from gpipe_fast.runtime.shape_families import family_key
from gpipe_fast.runtime.stage import BoundarySpec, TensorSpec


def boundary(tensor: torch.Tensor, requires_grad: bool = True) -> BoundarySpec:
    return BoundarySpec((TensorSpec.of(tensor, requires_grad),))


BASE = family_key(boundary(torch.empty(4, 6)), ((0, (6, 1)),))


def test_sizes_and_strides_do_not_matter() -> None:
    assert family_key(boundary(torch.empty(9, 2)), ((0, (2, 1)),)) == BASE
    assert family_key(boundary(torch.empty(6, 4).t()), ((0, (12, 2)),)) == BASE


@pytest.mark.parametrize(
    ("tensor", "requires_grad", "layouts"),
    [
        (torch.empty(4, 6, 1), True, ((0, (6, 1)),)),
        (torch.empty(4, 6).double(), True, ((0, (6, 1)),)),
        (torch.empty(4, 6), False, ((0, (6, 1)),)),
        (torch.empty(4, 6), True, ()),
        (torch.empty(4, 6), True, ((0, None),)),
        (torch.empty(4, 6), True, ((0, (1, 4)),)),
        (torch.empty(4, 6), True, ((0, (0, 1)),)),
    ],
    ids=["dims", "dtype", "requires_grad", "own layout", "no gradient", "transposed", "expanded"],
)
def test_other_families(tensor: torch.Tensor, requires_grad: bool, layouts: object) -> None:
    assert family_key(boundary(tensor, requires_grad), layouts) != BASE  # type: ignore[arg-type]
