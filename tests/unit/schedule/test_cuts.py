"""Estimates of the fastest partition of layers within a number of bytes."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest

from gpipe_fast.schedule import schedule_for
from gpipe_fast.schedule.cuts import (
    TOO_LARGE,
    Cost,
    LayerNeeds,
    Rung,
    best_partitions,
    needs_of_stages,
    time_of_stages,
)

MIB = 2**20


def random_layer(draw: random.Random) -> LayerNeeds:
    """Returns a layer whose first rungs save most time for their bytes, as those of minimum cuts do."""
    forward = draw.uniform(1, 3)
    steps = [(draw.uniform(0.1, 1), draw.randint(1, 20) * MIB) for _ in range(draw.randint(1, 4))]
    steps.sort(key=lambda step: step[0] / step[1], reverse=True)
    left = forward
    rungs = [Rung(0, left)]
    for time, size in steps:
        left -= forward * time / sum(time for time, _ in steps)
        rungs.append(Rung(rungs[-1].saved + size, max(0.0, left)))
    sizes = (draw.randint(1, most) * MIB for most in (5, 4, 9, 20))
    return LayerNeeds(forward, 2 * forward, rungs, *sizes)


def cuts_of(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Yields all partitions."""
    for own in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *own, num_layers)))


def cost_of(cost: Cost, balance: Sequence[int], join: Callable[[Iterable[float]], float] = max) -> float:
    ends = [*itertools.accumulate(balance, initial=0)]
    return join(cost(stage, *both) for stage, both in enumerate(itertools.pairwise(ends)))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_the_best_partitions_are_the_best_of_all(name: str) -> None:
    draw = random.Random(name)
    for _ in range(6):
        num_layers, num_stages, number = draw.choice([(6, 3, 4), (7, 2, 6), (5, 4, 3), (4, 1, 2)])
        layers = [random_layer(draw) for _ in range(num_layers)]
        devices = [f"gpu{stage}" for stage in range(num_stages)]
        recomputed = [*itertools.product(range(num_stages), range(number))]
        schedule = schedule_for(name, num_stages, number, recomputed=recomputed)
        every, times = [*cuts_of(num_layers, num_stages)], []
        for factor in (1, 3, 1000):
            limits = dict.fromkeys(devices, factor * 40.0 * MIB)
            cost = time_of_stages(layers, devices, limits, [1.0] * (number - 1) + [0.5], schedule)
            found = best_partitions(cost, num_layers, num_stages, count=3)
            assert found == sorted((cost_of(cost, each), each) for each in every)[:3]
            times.append(found[0][0])
        assert times == sorted(times, reverse=True)  # more bytes are never slower
        needs = needs_of_stages(layers, schedule)
        for join, total in ((operator.add, sum), (max, max)):
            [(_, balance)] = best_partitions(needs, num_layers, num_stages, join)
            assert cost_of(needs, balance, total) == min(cost_of(needs, each, total) for each in every)


def test_a_partition_that_fits_comes_before_a_faster_one_that_does_not() -> None:
    own = [LayerNeeds(1, 2, [Rung(0, 0)], 0, 0, fixed * MIB, 0) for fixed in (1.0, 1.0, 1.0, 5.0)]
    schedule = schedule_for("gpipe", 2, 4, recomputed=[])
    for limit, balance in ((100, (2, 2)), (5, (3, 1)), (1, (3, 1))):
        cost = time_of_stages(own, "ab", dict.fromkeys("ab", limit * MIB), [1.0] * 4, schedule)
        [(time, found)] = best_partitions(cost, 4, 2)
        assert found == balance
        assert (time < TOO_LARGE) == (limit >= 5)
