"""Offsets of clocks, from round trips whose true times are known."""

from __future__ import annotations

import random

import pytest

from gpipe_fast.distributed.clocks import Trip, offset_of


@pytest.mark.parametrize("ahead", [0, 10**12, -(10**15) - 1])
def test_the_error_is_at_most_half_the_shortest_round_trip(ahead: int) -> None:
    """Ways take random times, in each direction another one."""
    for seed in range(200):
        rng = random.Random(seed)
        trips, shortest = [], 10**9
        for _ in range(rng.randint(1, 9)):
            sent, there, back = rng.randrange(10**15), rng.randint(0, 10**6), rng.randint(0, 10**6)
            trips.append(Trip(sent, sent + there + ahead, sent + there + back))
            shortest = min(shortest, there + back)
        offset, error = offset_of(trips)
        assert error == (shortest + 1) // 2
        assert abs(offset - ahead) <= error
