"""Estimates of the fastest partition of layers within a number of bytes."""

from __future__ import annotations

import itertools
import random

import pytest

from gpipe_fast.schedule import Schedule, schedule_for
from gpipe_fast.schedule.cuts import LayerNeeds, Rung, partitions, smallest_partition

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


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_every_partition_is_found_once_and_the_least_time_comes_first(name: str) -> None:
    draw = random.Random(name)
    for _ in range(6):
        num_layers, num_stages, number = draw.choice([(6, 3, 4), (7, 2, 6), (5, 4, 3), (4, 1, 2)])
        layers = [random_layer(draw) for _ in range(num_layers)]
        devices = [f"gpu{stage}" for stage in range(num_stages)]
        recomputed = [*itertools.product(range(num_stages), range(number))]
        schedule = schedule_for(name, num_stages, number, recomputed=recomputed)
        times = []
        for factor in (1, 3, 1000):
            limits = dict.fromkeys(devices, factor * 40.0 * MIB)
            found = [*partitions(layers, devices, limits, [1.0] * (number - 1) + [0.5], schedule)]
            assert [time for time, _ in found] == sorted(time for time, _ in found)
            cuts = itertools.combinations(range(1, num_layers), num_stages - 1)
            every = {tuple(b - a for a, b in itertools.pairwise((0, *own, num_layers))) for own in cuts}
            assert sorted(balance for _, balance in found) == sorted(every)
            times.append(found[0][0])
        assert times == sorted(times, reverse=True)  # more bytes are never slower


def test_a_partition_that_fits_comes_before_a_faster_one_that_does_not() -> None:
    own = [LayerNeeds(1, 2, [Rung(0, 0)], 0, 0, fixed * MIB, 0) for fixed in (1.0, 1.0, 1.0, 5.0)]
    schedule = schedule_for("gpipe", 2, 4, recomputed=[])
    for limit, balance in ((100, (2, 2)), (5, (3, 1)), (1, (3, 1))):
        time, found = next(partitions(own, "ab", dict.fromkeys("ab", limit * MIB), [1.0] * 4, schedule))
        assert found == balance
        assert (time < 1e18) == (limit >= 5)


def needs_of_stages(layers: list[LayerNeeds], schedule: Schedule) -> dict[tuple[int, ...], list[float]]:
    """Returns what each stage needs of each partition: what it lacks if its limit alone is 0."""
    found: dict[tuple[int, ...], list[float]] = {}
    for stage in range(schedule.num_stages):
        limits = dict.fromkeys(range(schedule.num_stages), 1e15) | {stage: 0.0}
        for needed, balance in partitions(layers, [*limits], limits, [1.0] * 4, schedule):
            found.setdefault(balance, []).append(needed - 1e18)
    return found


@pytest.mark.parametrize("shared", [False, True])
def test_the_smallest_partition_needs_least(shared: bool) -> None:
    draw = random.Random(0)
    for _ in range(20):
        num_layers, num_stages = draw.choice([(6, 3), (5, 4), (4, 1), (7, 2)])
        layers = [random_layer(draw) for _ in range(num_layers)]
        recomputed = [*itertools.product(range(num_stages), range(4))]
        schedule = schedule_for("gpipe", num_stages, 4, recomputed=recomputed)
        devices = ["cpu"] * num_stages if shared else [*range(num_stages)]
        every = {own: (sum if shared else max)(x) for own, x in needs_of_stages(layers, schedule).items()}
        assert every[smallest_partition(layers, devices, schedule)] == min(every.values())
