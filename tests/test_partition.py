"""Cuts into partitions, against trying every cut."""

from __future__ import annotations

import itertools
import random

import pytest

from gpipe_fast.partition import cut_evenly


def dearest(costs: list[float], sizes: list[int]) -> float:
    ends = list(itertools.accumulate(sizes, initial=0))
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))


def every_cut(num_layers: int, num_partitions: int) -> list[list[int]]:
    inner = itertools.combinations(range(1, num_layers), num_partitions - 1)
    return [[b - a for a, b in itertools.pairwise((0, *cuts, num_layers))] for cuts in inner]


@pytest.mark.parametrize("seed", range(60))
def test_no_cut_is_better(seed: int) -> None:
    generator = random.Random(seed)
    costs = [float(generator.choice([0, 0, 1, 2, 3, 10, 100])) for _ in range(generator.randrange(1, 9))]
    for num_partitions in range(1, len(costs) + 1):
        sizes = cut_evenly(costs, num_partitions)
        assert len(sizes) == num_partitions
        assert sum(sizes) == len(costs)
        assert min(sizes) >= 1
        best = min(dearest(costs, cut) for cut in every_cut(len(costs), num_partitions))
        assert dearest(costs, sizes) == best


def test_equal_layers_are_cut_equally() -> None:
    assert cut_evenly([1.0] * 12, 4) == [3, 3, 3, 3]


def test_an_expensive_layer_stands_alone() -> None:
    assert cut_evenly([1, 1, 9, 1, 1], 3) == [2, 1, 2]


@pytest.mark.parametrize("num_partitions", [0, -1, 4])
def test_refuses_more_partitions_than_layers(num_partitions: int) -> None:
    with pytest.raises(ValueError, match=f"cannot cut 3 layers into {num_partitions} partitions"):
        cut_evenly([1, 2, 3], num_partitions)
