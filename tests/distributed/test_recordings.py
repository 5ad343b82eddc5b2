"""A recording over several processes has every action of every stage once, on one clock."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from bench.compare.network import NoNetworkError, network
from gpipe_fast.reports.timeline import sender_of
from gpipe_fast.schedule import Action, Schedule, fill_drain, schedule_for
from tests.distributed import recording_cases as cases
from tests.distributed.launch import RankFailed, needs_gloo, run_ranks

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


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "name"),
    [
        (2, 4, "interleaved"),
        *(pytest.param(n, n, name, marks=pytest.mark.extended) for n, name in ((2, "1f1b"), (3, "zb-h1"))),
    ],
)
def test_every_rank_has_all_stages(num_ranks: int, num_stages: int, name: str) -> None:
    found = run_ranks(num_ranks, cases.recorded, "step", num_stages, name)
    check(found, schedule_of(name, num_stages, num_ranks))
    memory = found[0]["report"]["memory"]
    assert [own["gradients"] for own in memory] == [own["parameters"] for own in memory]


def test_each_replica_has_its_own_events() -> None:
    found = run_ranks(4, cases.recorded, "step", 2, "1f1b", 2)
    for replica in (found[:2], found[2:]):
        check(replica, schedule_of("1f1b", 2, 2))
    assert found[0]["stages"] != found[2]["stages"]


def test_forward_and_backward_in_two_calls() -> None:
    found = run_ranks(2, cases.recorded, "two lines", 2, "gpipe")
    check(found, fill_drain(2, NUM_MICROBATCHES, recomputed=range(NUM_MICROBATCHES - 1)))
    assert found[0]["report"]["between"] > 0


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.extended)])
def test_clocks_that_differ(num_ranks: int) -> None:
    """Clocks of hosts have nothing in common; here each is 1000 s ahead of the one before."""
    found = run_ranks(num_ranks, cases.on_other_clocks, AHEAD)
    check(found, schedule_of("1f1b", num_ranks, num_ranks))
    assert max(delays_of(found[0], 0)) < AHEAD / 2


def test_a_slow_network() -> None:
    """Packets take 20 ms longer, which no estimate of clocks may hide."""
    try:
        with network(2, delay=0.02) as hosts:
            found = run_ranks(2, cases.recorded, "step", 2, "1f1b", hosts=hosts)
    except NoNetworkError as error:
        pytest.skip(str(error))
    check(found, schedule_of("1f1b", 2, 2))
    assert found[0]["clock_error"] >= 0.02
    delays_of(found[0], 0.02)
    assert found[0]["report"]["blame"]["transfer"] > 0


def test_reports_and_advice_are_those_of_all_stages() -> None:
    (first, is_unchanged), other = run_ranks(2, cases.reported, True)
    assert other == (first, True)
    assert is_unchanged
    assert len(first["stages"]) == len(first["memory"]) == 2
    assert first["growth"]
    assert {advice["code"].split(" ")[0] for advice in first["advice"]} <= {
        f"model.{name}" for name in ("checkpoint", "schedule", "chunks")
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


@pytest.mark.extended
def test_a_rank_that_does_not_come() -> None:
    with pytest.raises(RankFailed, match=r"rank 0 has waited for .* s for ranks \[1\]"):
        run_ranks(2, cases.not_leaving, hangs=[1])
