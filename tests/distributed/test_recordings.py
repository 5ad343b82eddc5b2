"""A recording over several processes has every action of every stage once, on one clock."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from gpipe_fast.reports.timeline import sender_of
from gpipe_fast.schedule import Action, Schedule, schedule_for
from tests.distributed import recording_cases as cases
from tests.distributed.launch import needs_gloo, run_ranks

pytestmark = needs_gloo

# Of times in seconds since the machine has started.
ROUNDING = 1e-6
# Seconds by which clocks differ.
AHEAD = 1000.0
NUM_MICROBATCHES = 4


def schedule_of(name: str, num_stages: int, num_ranks: int) -> Schedule:
    """Returns the schedule of a step in which all micro-batches but the last recompute."""
    again = range(NUM_MICROBATCHES - 1)
    return schedule_for(name, num_stages, NUM_MICROBATCHES, num_devices=num_ranks, recomputed=again)


def check(found: list[dict[str, Any]], schedule: Schedule) -> None:
    """Checks what ranks have of two steps, each recorded once."""
    first, *others = found
    assert all(each == first for each in others)
    events = [[event for event in stage if not event[1]] for stage in first["stages"]]
    for actions, stage in zip(schedule.stages, events, strict=True):
        assert Counter(Action(*event[0]) for event in stage) == Counter([*actions, *actions])
    report = first["report"]
    for stage in report["stages"]:
        assert sum(stage.values()) == pytest.approx(report["step"], abs=ROUNDING)
    assert sum(report["blame"].values()) == pytest.approx(1.0)
    assert len(report["memory"]) == schedule.num_stages
    assert report["memory"][0]["parameters"] > 0
    assert report["memory"][-1]["parameters"] > 0
    assert 0 <= first["clock_error"] < AHEAD
    assert delays_of(first, -ROUNDING) != []


def delays_of(found: dict[str, Any], least: float) -> list[float]:
    """Returns the seconds from the begin of each SEND to the end of its RECV, and checks a lower bound."""
    times = {
        (Action(*action), run): (begin, end)
        for stage in found["stages"]
        for action, is_wait, begin, end, run, *_ in stage
        if not is_wait
    }
    delays = [
        end - times[send, run][0]
        for (action, run), (_, end) in times.items()
        if (send := sender_of(action)) is not None
    ]
    assert min(delays) >= least - found["clock_error"]
    return delays


def test_every_rank_has_all_stages() -> None:
    found = run_ranks(2, cases.recorded, 4, "interleaved")
    check(found, schedule_of("interleaved", 4, 2))
    memory = found[0]["report"]["memory"]
    assert [own["gradients"] for own in memory] == [own["parameters"] for own in memory]


def test_each_replica_has_its_own_events() -> None:
    found = run_ranks(4, cases.recorded, 2, "1f1b", 2)
    for replica in (found[:2], found[2:]):
        check(replica, schedule_of("1f1b", 2, 2))
    assert found[0]["stages"] != found[2]["stages"]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.extended)])
def test_clocks_that_differ(num_ranks: int) -> None:
    """Clocks of hosts have nothing in common; here each is 1000 s ahead of the one before."""
    found = run_ranks(num_ranks, cases.on_other_clocks, AHEAD)
    check(found, schedule_of("1f1b", num_ranks, num_ranks))
    assert max(delays_of(found[0], 0)) < AHEAD / 2


def test_reports_and_advice_are_those_of_all_stages() -> None:
    (first, is_unchanged), other = run_ranks(2, cases.reported, True)
    assert other == (first, True)
    assert is_unchanged
    assert len(first["stages"]) == len(first["memory"]) == 2
    assert {advice["code"].split(" ")[0] for advice in first["advice"]} <= {
        "GPipe(...,",
        *(f"model.{name}" for name in ("checkpoint", "schedule", "chunks")),
    }


def test_ranks_that_do_otherwise() -> None:
    """Every rank raises an error, and the next recording works, also if a run fails inside."""
    first, second = run_ranks(2, cases.failing_in_a_recording)
    assert first[0].startswith("RuntimeError: rank 1 has failed, so no rank changed anything: ValueError")
    assert second[0] == "ValueError: no data"
    assert any("the end of a recording" in errors[1] for errors in (first, second))
    assert first[1]
    assert second[1]
    assert first[2] == second[2] == ""
