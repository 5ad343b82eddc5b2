"""Offsets of elements as expressions of an index, against the offsets that strides give."""

from __future__ import annotations

import itertools
import random

import pytest

from gpipe_fast.fuse.regions.layout import Layout, contiguous_strides

SIZES = {0: 4, 1: 3, 2: 5}


def test_axes_that_lie_behind_each_other_are_counted_as_one() -> None:
    x = contiguous_strides([0, 1], SIZES)
    assert x == {0: 3, 1: 1}
    layout = Layout.of("row", (0, 1), SIZES, [x])
    assert layout.groups == (((0, 1), 12),)
    assert layout.offset(x) == "row"
    assert layout.offset({0: 3000, 1: 1000}) == "row * 1000"


@pytest.mark.parametrize("seed", range(40))
def test_expressions_give_the_offsets_of_random_strides(seed: int) -> None:
    rng = random.Random(seed)
    axes = rng.sample(range(4), rng.randint(1, 4))
    sizes = {a: rng.randint(2, 5) for a in range(4)}
    tensors = []
    for _ in range(3):
        present = rng.sample(axes, rng.randint(0, len(axes)))
        if rng.random() < 0.6:
            present.sort(key=axes.index)
        strides = contiguous_strides(present, sizes)
        tensors.append({a: s * rng.choice((1, 1, 2)) for a, s in strides.items()})
    layout = Layout.of("i", axes, sizes, tensors)
    for strides in tensors:
        expression = layout.offset(strides) or "0"
        for i, position in enumerate(itertools.product(*(range(sizes[a]) for a in axes))):
            expected = sum(p * strides.get(a, 0) for p, a in zip(position, axes, strict=True))
            assert eval(expression, {"i": i}) == expected
