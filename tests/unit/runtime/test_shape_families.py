"""Shape families: everything about inputs and gradients except their sizes."""

from __future__ import annotations

import torch

from gpipe_fast.runtime.shape_families import family_key
from gpipe_fast.runtime.stage import BoundarySpec, TensorSpec
from gpipe_fast.trace.gradient_layouts import GradientLayout


def test_families_differ_in_all_but_sizes_and_strides() -> None:
    def key(tensor: torch.Tensor, *strides: tuple[int, ...] | None, requires_grad: bool = True) -> object:
        boundary = BoundarySpec((TensorSpec.of(tensor, requires_grad),))
        layouts = [None if each is None else GradientLayout(each) for each in strides]
        return family_key(boundary, tuple((0, each) for each in layouts))

    x = torch.empty(4, 6)
    base = key(x, (6, 1))
    assert key(torch.empty(9, 2), (2, 1)) == key(torch.empty(6, 4).t(), (12, 2)) == base
    others = [key(x[..., None], (6, 1)), key(x.double(), (6, 1)), key(x, (6, 1), requires_grad=False)]
    others += [key(x), key(x, None), key(x, (1, 4)), key(x, (0, 1))]
    assert base not in others
