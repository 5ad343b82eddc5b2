"""Recordings of several processes whose true times are known become one, on the first clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from gpipe_fast.recording import Event, Recording
from gpipe_fast.reports.recording import exchange_stages, merge
from gpipe_fast.reports.report import StageSizes
from gpipe_fast.reports.timeline import sender_of
from gpipe_fast.schedule import TRANSFERS, Action, Kind, simulate

LATENCY, START = 0.25, 1000.0
# Seconds by which the clock of each process is ahead of that of the first, and the error of the estimate.
AHEAD, ERROR = [0.0, -500.0, 1e5], 0.001


def recordings(in_recv: bool, first_runs: list[int]) -> tuple[list[Recording], dict[Action, Event]]:
    """Returns what each process has recorded, one with each stage, and the true events.

    Args:
        in_recv: whether a RECV waits for a tensor, and not the SEND in the process that receives.
        first_runs: the number of the run in each process.
    """
    num_ranks = len(first_runs)
    found = simulate("1f1b", num_ranks, 6, forward=[1.0, 2.0, 1.0][:num_ranks], latency=LATENCY)
    true = {
        action: Event(action, False, START + found.begins[action], START + end, transit=LATENCY)
        if action.kind in (Kind.SEND_F, Kind.SEND_B)
        else Event(action, False, START + found.begins[action], START + end)
        for action, end in found.ends.items()
    }
    before = {b: a for row in found.schedule.ranks for a, b in pairwise(row)}
    parts = []
    for rank, run in enumerate(first_runs):
        stages: list[list[Event]] = [[] for _ in range(num_ranks)]

        def add(
            action: Action,
            is_wait: bool,
            begin: float,
            end: float,
            to: Any = stages,
            run: int = run,
            ahead: float = AHEAD[rank],
        ) -> None:
            to[action.stage].append(Event(action, is_wait, begin + ahead, end + ahead, run))

        for action in found.schedule.stages[rank]:
            own, send = true[action], sender_of(action)
            if send is not None:
                arrival = true[send].end + LATENCY
                if not in_recv:
                    add(send, False, arrival - 0.1, arrival)
                add(action, True, true[before[action]].end if action in before else START, own.begin)
            add(action, False, own.begin, own.end)
        recording = Recording()
        recording.stages = tuple(map(tuple, stages))
        recording.kernels = tuple((f"kernel {stage} of {rank}",) for stage in range(num_ranks))
        recording.sizes = tuple(StageSizes(stage, rank) for stage in range(num_ranks))
        parts.append(recording)
    return parts, true


def exchanged(parts: list[Recording], in_recv: bool) -> list[Recording]:
    """Exchanges recordings as JSON, with offsets that have an error."""
    passed: list[Any] = []

    def note(own: Any) -> list[Any]:
        passed.append(json.dumps(own))
        raise StopIteration

    def all_passed(_: Any) -> list[Any]:
        offsets = [(0, 0), (round((-AHEAD[1] + ERROR) * 1e9), round(ERROR * 1e9))]
        offsets.append((round((-AHEAD[2] - ERROR) * 1e9), round(ERROR * 1e9)))
        return [(offset, json.loads(own)) for offset, own in zip(offsets, passed, strict=False)]

    for exchange in (note, all_passed):
        _exchange(parts, exchange, in_recv)
    return parts


def _exchange(parts: list[Recording], exchange: Callable[[Any], Any], in_recv: bool) -> None:
    for rank, recording in enumerate(parts):
        try:
            exchange_stages(recording, [rank], exchange, receives_in_recv=in_recv)
        except StopIteration:
            continue


@pytest.mark.parametrize("first_runs", [[1, 1], [4, 9, 2]])
@pytest.mark.parametrize("in_recv", [False, True])
def test_the_true_times(first_runs: list[int], in_recv: bool) -> None:
    parts, true = recordings(in_recv, first_runs)
    num_ranks = len(parts)
    first, *others = exchanged(parts, in_recv)
    assert all(each.stages == first.stages for each in others)
    assert first.clock_error == pytest.approx(ERROR * (num_ranks - 1))
    assert first.sizes == tuple(StageSizes(stage, stage) for stage in range(num_ranks))
    assert first.kernels == tuple((f"kernel {stage} of {stage}",) for stage in range(num_ranks))
    actions = [event for stage in first.stages for event in stage if not event.is_wait]
    assert len(actions) == len(true)
    for event in actions:
        own = true[event.action]
        assert event.begin == pytest.approx(own.begin, abs=first.clock_error)
        assert event.end == pytest.approx(own.end, abs=first.clock_error)
        if event.transit or not in_recv:  # a RECV that came later than its tensor does not say when it came
            assert event.transit == pytest.approx(own.transit, abs=2 * first.clock_error)


@pytest.mark.parametrize("in_recv", [False, True])
def test_time_in_the_network_is_due_to_transfer(in_recv: bool) -> None:
    """Nothing else takes time but the layers, so the rest is due to the schedule and the slow stage."""
    first, *_ = exchanged(recordings(in_recv, [1, 1, 1])[0], in_recv)
    report = first.report()
    blame = report.blame
    assert sum(blame.values()) == pytest.approx(1)
    assert blame["host"] == pytest.approx(0, abs=0.01)
    assert blame["transfer"] > 0.05
    assert report.path_seconds == pytest.approx(report.step, abs=10 * first.clock_error)
    for stage in report.stages:
        assert sum(stage) == pytest.approx(report.step, abs=2 * first.clock_error)


def test_runs_are_matched_from_the_last() -> None:
    """A run that failed has begun in one process only."""

    def part(runs: list[int], stage: int) -> dict[str, Any]:
        kind = Kind.SEND_F if stage == 0 else Kind.RECV_F
        events = [[f"{stage}{kind.value}0", False, run, run + 0.5, run, 0, 0, 0, 0.0] for run in runs]
        arrivals = [["0SEND_F0", run, run + 0.75] for run in runs if stage]
        return {"events": events, "arrivals": arrivals, "others": [[stage, [], [0, 0]]]}

    recording = Recording()
    merge(recording, [((0, 0), part([3, 4, 5], 0)), ((-(10**10), 0), part([14, 15], 1))])
    assert [[event.run for event in stage] for stage in recording.stages] == [[1, 2, 3], [2, 3]]
    assert [event.transit for event in recording.stages[0]] == [0, 0.25, 0.25]
    assert [event.begin for event in recording.stages[1]] == [4, 5]
    assert {event.action.kind for stage in recording.stages for event in stage} <= {*TRANSFERS}
