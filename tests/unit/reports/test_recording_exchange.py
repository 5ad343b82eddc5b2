"""Recordings of several processes whose true times are known become one, on the first clock."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpipe_fast.recording import Event, Recording
from gpipe_fast.reports.recording import exchange_stages
from gpipe_fast.reports.report import StageSizes
from gpipe_fast.reports.timeline import sender_of
from gpipe_fast.schedule import Action, Kind, simulate

LATENCY, START, NUM_RANKS = 0.25, 1000.0, 3
# Seconds by which the clock of each process is ahead of that of the first, and the error of the estimate.
AHEAD, ERROR = [0.0, -500.0, 1e5], 0.001
OFFSETS = [(0, 0), (round(500.001e9), round(ERROR * 1e9)), (round(-100000.001e9), round(ERROR * 1e9))]
FOUND = simulate("1f1b", NUM_RANKS, 6, forward=[1.0, 2.0, 1.0], latency=LATENCY)


def true_event(action: Action) -> Event:
    transit = LATENCY if action.kind in (Kind.SEND_F, Kind.SEND_B) else 0.0
    return Event(action, False, START + FOUND.begins[action], START + FOUND.ends[action], transit=transit)


def recorded_by(rank: int, run: int, in_recv: bool) -> Recording:
    """Returns what a process records; a RECV waits for a tensor, or the SEND in the process that receives."""
    stages: list[list[Event]] = [[] for _ in range(NUM_RANKS)]
    now = START
    for action in FOUND.schedule.stages[rank]:
        own, send = true_event(action), sender_of(action)
        spans = [(action, False, own.begin, own.end)]
        if send is not None:
            arrival = true_event(send).end + LATENCY
            spans.insert(0, (action, True, now, own.begin))
            spans[:0] = [] if in_recv else [(send, False, arrival - 0.1, arrival)]
        for each, is_wait, begin, end in spans:
            event = Event(each, is_wait, begin + AHEAD[rank], end + AHEAD[rank], run)
            stages[each.stage].append(event)
        now = own.end
    recording = Recording()
    recording.stages = tuple(map(tuple, stages))
    recording.kernels = ((),) * NUM_RANKS
    recording.sizes = tuple(StageSizes(stage, rank) for stage in range(NUM_RANKS))
    return recording


@pytest.mark.parametrize("in_recv", [False, True])
def test_the_true_times_on_one_clock(in_recv: bool) -> None:
    parts = [recorded_by(rank, run, in_recv) for rank, run in enumerate((4, 9, 2))]
    passed: list[Any] = []

    def note(own: Any) -> list[Any]:
        passed.append(json.dumps(own))
        raise StopIteration

    for rank, recording in enumerate(parts):
        with pytest.raises(StopIteration):
            exchange_stages(recording, [rank], note, receives_in_recv=in_recv)
    received = [(offset, json.loads(own)) for offset, own in zip(OFFSETS, passed, strict=True)]
    for rank, recording in enumerate(parts):
        exchange_stages(recording, [rank], lambda own: received, receives_in_recv=in_recv)
    first, *others = parts
    assert all(each.stages == first.stages for each in others)
    assert first.clock_error == pytest.approx(ERROR * (NUM_RANKS - 1))
    assert first.sizes == tuple(StageSizes(stage, stage) for stage in range(NUM_RANKS))
    actions = [event for stage in first.stages for event in stage if not event.is_wait]
    assert len(actions) == len(FOUND.ends)
    for event in actions:
        own = true_event(event.action)
        assert (event.begin, event.end) == pytest.approx((own.begin, own.end), abs=first.clock_error)
        if event.transit or not in_recv:  # a RECV that came later than its tensor does not say when it came
            assert event.transit == pytest.approx(own.transit, abs=2 * first.clock_error)
    report = first.report()
    assert report.blame["host"] == pytest.approx(0, abs=0.01)
    assert report.blame["transfer"] > 0.05
