"""The values of a region: what each is computed from, and what is behind views."""

from __future__ import annotations

import torch

from gpipe_fast.fuse.regions.values import Constant, Draw, Mapped, Reduced, View, operands_of, root_of

F32 = torch.float32
X, Y = Constant((2, 3), F32, 1.0), Constant((2, 3), F32, 1.0)


def test_values_are_equal_only_to_themselves() -> None:
    assert X != Y
    assert len({X, Y}) == 2


def test_operands() -> None:
    product = Mapped((2, 3), F32, "{0} * {1}", (X, Y), F32)
    assert operands_of(product) == (X, Y)
    assert operands_of(Reduced((2, 1), F32, "sum", product, (1,))) == (product,)
    assert operands_of(Draw((2, 3), F32, X, 0, 1, 0.5)) == (X,)
    assert operands_of(X) == ()


def test_the_root_is_behind_all_views() -> None:
    view = View((6,), F32, View((3, 2), F32, X, (1, 0)))
    assert root_of(view) is root_of(X) is X
    assert operands_of(view) == (view.operand,)
