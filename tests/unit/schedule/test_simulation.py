"""Simulations against closed forms, and against another way to compute them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from gpipe_fast.schedule import SCHEDULES, Action, Kind, Simulation, fill_drain, simulate
from tests.unit.schedule.test_schedule import constraints


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_is_that_of_the_paper(name: str) -> None:
    """If nothing of a backward comes after the gradient of the input is sent."""
    for k, m in ((1, 4), (2, 1), (3, 7), (4, 8)):
        found = simulate(name, k, m, forward=1.5, backward=3.5, weights=0)
        plain = simulate(name, k, m, forward=1.5, backward=3.5, weights=0, checkpoint="never")
        assert plain.time == pytest.approx((m + k - 1) * 5)
        assert plain.bubble == pytest.approx((k - 1) / (m + k - 1))
        assert plain.time <= found.time <= plain.time + 1.5 * m


def test_the_kept_micro_batches_and_their_bytes() -> None:
    assert simulate("gpipe", 4, 8).kept == (8, 8, 8, 8)
    assert simulate("1f1b", 4, 8).kept == (4, 3, 2, 1)
    assert simulate("zb-h1", 4, 8).kept == (4, 4, 4, 4)
    options = {"boundary_bytes": [1, 2, 3, 4], "activation_bytes": 100}
    never = simulate("1f1b", 4, 8, checkpoint="never", **options)  # type: ignore[arg-type]
    assert never.peak_bytes == (4 * 101, 3 * 102, 2 * 103, 104)
    always = simulate("gpipe", 4, 8, checkpoint="always", **options)  # type: ignore[arg-type]
    assert always.peak_bytes == (8 * 1 + 100, 8 * 2 + 100, 8 * 3 + 100, 8 * 4 + 100)
    but_last = simulate("gpipe", 4, 8, **options)  # type: ignore[arg-type]
    # The last micro-batch's activations are freed before the first recompute.
    assert but_last.peak_bytes == always.peak_bytes
    assert simulate("1f1b", 4, 8).peak_bytes == ()


def random_simulation(seed: int) -> tuple[Simulation, dict[Action, float], dict[Action, float]]:
    draw = random.Random(seed)
    num_stages, num_microbatches = draw.randint(1, 5), draw.randint(1, 6)
    name = draw.choice([*SCHEDULES])
    recomputed = range(draw.randint(0, num_microbatches))
    if name == "interleaved" and num_stages % 2:
        num_stages += 1
    schedule = SCHEDULES[name](num_stages, num_microbatches, recomputed=recomputed)
    if draw.random() < 0.3 and name == "gpipe":
        schedule = fill_drain(num_stages, num_microbatches, slots=1, backward=False)
    seconds = {action: draw.choice([0.0, draw.random()]) for action in schedule.order()}
    transit = {a: draw.random() for a in schedule.order() if a.kind in (Kind.SEND_F, Kind.SEND_B)}
    return Simulation.of(schedule, seconds.__getitem__, transit.__getitem__), seconds, transit


@pytest.mark.parametrize("seed", range(20))
def test_actions_end_as_early_as_their_constraints_allow(seed: int) -> None:
    """And the critical path takes the time of the step."""
    found, seconds, transit = random_simulation(seed)
    begins = dict.fromkeys(seconds, 0.0)
    waits, path = found.schedule.waits(), found.critical_path
    for before, after in constraints(found.schedule):
        is_sent = after.kind in (Kind.RECV_F, Kind.RECV_B) and abs(after.stage - before.stage) == 1
        delay = transit.get(before, 0.0) if is_sent and after.microbatch == before.microbatch else 0.0
        begins[after] = max(begins[after], found.ends[before] + delay)
    assert found.ends == pytest.approx({action: begins[action] + seconds[action] for action in seconds})
    assert found.time == max(found.ends.values())
    total = sum(seconds[action] for action in path)
    for before, after in pairwise(path):
        in_rank = found.schedule.rank_of[before.stage] == found.schedule.rank_of[after.stage]
        assert in_rank or waits[after] == before
        if after.kind in (Kind.RECV_F, Kind.RECV_B) and waits[after] == before:
            total += transit[before]
    assert total == pytest.approx(found.time)
    assert found.begins[path[0]] == pytest.approx(0)


def test_a_slow_connection_delays_and_takes_no_time_of_a_stage() -> None:
    fast = simulate("gpipe", 3, 4, weights=0, checkpoint="never")
    slow = simulate(
        "gpipe", 3, 4, weights=0, checkpoint="never", latency=0.25, boundary_bytes=50, bandwidth=200
    )
    assert slow.busy == fast.busy == (12, 12, 12)
    assert slow.time == pytest.approx(fast.time + 4 * 0.5)


def test_the_dictionary_and_the_text() -> None:
    found = simulate("1f1b", 2, 2, activation_bytes=1000, checkpoint="never")
    values = found.to_dict()
    assert values["time"] == found.time
    assert len(values["actions"]) == len(found.ends)
    assert values["critical_path"][0] == "0F0"
    assert "stage 1: busy" in str(found)
    assert "at most 2,000 bytes" in str(found)
    interleaved = simulate("interleaved", 4, 4, num_devices=2)
    assert "rank 1: busy" in str(interleaved)
    assert len(interleaved.busy) == 2


def test_a_step_that_takes_no_time() -> None:
    found = simulate("gpipe", 2, 2, forward=0, backward=0)
    assert (found.time, found.bubble) == (0, 0)
    assert "busy 0.0%" in str(found)
