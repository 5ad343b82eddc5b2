"""Axes of dimensions: identified with each other, divided, and reshaped."""

from __future__ import annotations

import itertools
import math

import pytest

from gpipe_fast.fuse.regions.axes import Axes, Conflict, Dims


def resolved(axes: Axes, dims: Dims) -> list[tuple[int, ...]]:
    """Returns the sizes of the undivided axes of each dimension."""
    return [tuple(axes.size(a) for a in axes.resolve(dim)) for dim in dims]


def test_sizes_that_do_not_divide_each_other_conflict() -> None:
    axes = Axes()
    whole, (a, b), (c, d) = axes.dims((24,))[0], axes.dims((6, 4)), axes.dims((3, 8))
    axes.identify(whole, (*a, *b))
    axes.identify(whole, (*c, *d))  # 3 * 2 * 4
    assert resolved(axes, ((*c, *d),)) == [(3, 2, 4)]
    axes = Axes()
    (a, b), (c, d) = axes.dims((4, 6)), axes.dims((6, 4))
    with pytest.raises(Conflict, match="divides dimensions of other sizes"):
        axes.identify((*a, *b), (*c, *d))
    with pytest.raises(Conflict, match="a view divides"):
        axes.reshape(axes.dims((4, 6)), (6, 4))
    (whole,), (a, b) = axes.dims((6,)), axes.dims((4, 6))
    with pytest.raises(Conflict, match="different sizes are combined"):
        axes.identify(whole, (*a, *b))


SHAPES = [(24,), (1, 24), (4, 6), (6, 4), (8, 3), (24, 1), (2, 12), (2, 2, 6), (4, 2, 3), (3, 2, 4)]


@pytest.mark.parametrize(("first", "second"), list(itertools.product(SHAPES, repeat=2)))
def test_every_view_has_the_elements_in_order_or_conflicts(
    first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    axes = Axes()
    x = axes.dims(first)
    try:
        y = axes.reshape(x, second)
    except Conflict:
        return
    assert [math.prod(sizes) for sizes in resolved(axes, y)] == list(second)
    assert [math.prod(sizes) for sizes in resolved(axes, x)] == list(first)
    assert axes.resolve(a for d in x for a in d) == axes.resolve(a for d in y for a in d)
