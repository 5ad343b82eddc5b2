"""Axes of dimensions: identified with each other, divided, and reshaped."""

from __future__ import annotations

import itertools
import math

import pytest

from gpipe_fast.fuse.regions.axes import Axes, Conflict, Dims


def resolved(axes: Axes, dims: Dims) -> list[tuple[int, ...]]:
    """Returns the sizes of the undivided axes of each dimension."""
    return [tuple(axes.size(a) for a in axes.resolve(dim)) for dim in dims]


def test_dimensions_of_one_element_have_no_axes() -> None:
    axes = Axes()
    assert axes.dims((4, 1, 6)) == ((0,), (), (1,))
    assert (axes.size(0), axes.size(1)) == (4, 6)


def test_equal_axes_become_one() -> None:
    axes = Axes()
    x, y = axes.dims((4, 6)), axes.dims((4, 6))
    for own, other in zip(x, y, strict=True):
        axes.identify(own, other)
    assert [axes.resolve(dim) for dim in x] == [axes.resolve(dim) for dim in y]


def test_an_axis_is_divided_to_match_two() -> None:
    axes = Axes()
    (whole,), (a, b) = axes.dims((24,)), axes.dims((4, 6))
    axes.identify(whole, (*a, *b))
    assert axes.resolve(whole) == (*axes.resolve(a), *axes.resolve(b))
    assert resolved(axes, (whole,)) == [(4, 6)]


def test_axes_are_divided_further() -> None:
    axes = Axes()
    whole, pairs, triples = axes.dims((24,))[0], axes.dims((12, 2)), axes.dims((4, 6))
    axes.identify(whole, [a for dim in pairs for a in dim])
    axes.identify(whole, [a for dim in triples for a in dim])
    assert resolved(axes, (whole, *pairs, *triples)) == [(4, 3, 2), (4, 3), (2,), (4,), (3, 2)]


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


def test_different_numbers_of_elements_conflict() -> None:
    axes = Axes()
    (a,), (b, c) = axes.dims((6,)), axes.dims((4, 6))
    with pytest.raises(Conflict, match="different sizes are combined"):
        axes.identify(a, (*b, *c))


def test_a_view_joins_and_divides_dimensions() -> None:
    axes = Axes()
    x = axes.dims((4, 1, 6, 10))
    flat = axes.reshape(x, (24, 10))
    assert flat == ((*x[0], *x[2]), x[3])
    heads = axes.reshape(flat, (4, 6, 1, 2, 5))
    assert resolved(axes, heads) == [(4,), (6,), (), (2,), (5,)]
    assert resolved(axes, x) == [(4,), (), (6,), (2, 5)]
    # The same division again gives the same axes.
    assert [axes.resolve(d) for d in axes.reshape(x, (24, 2, 5))[1:]] == [axes.resolve(d) for d in heads[3:]]


def test_a_view_of_other_sizes_conflicts() -> None:
    axes = Axes()
    with pytest.raises(Conflict, match="a view divides"):
        axes.reshape(axes.dims((4, 6)), (6, 4))


def _factorizations(size: int) -> list[tuple[int, ...]]:
    """Returns the shapes of two or three dimensions with so many elements."""
    pairs = [(a, size // a) for a in range(1, size + 1) if size % a == 0]
    return [*pairs, *((a, b, c) for a, rest in pairs for b, c in [(2, rest // 2)] if rest % 2 == 0)]


@pytest.mark.parametrize(("first", "second"), list(itertools.product(_factorizations(24), repeat=2)))
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
