"""Recordings: complete and ordered actions, waits, and the figures computed from them."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import pytest
import torch

from gpipe_fast import GPipe
from gpipe_fast.reports.events import Event
from gpipe_fast.reports.recording import Recording, merge
from gpipe_fast.schedule import BACKWARD as IN_BACKWARD
from gpipe_fast.schedule import SCHEDULES, Action, Kind, Schedule, fill_drain
from tests.internals import inject_delays, inject_failure, pipeline_of, remove_faults
from tests.models import features, mlp, uneven_balance
from tests.reference import loop_step, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")

SEND_OF = {Kind.RECV_F: (Kind.SEND_F, -1), Kind.RECV_B: (Kind.SEND_B, 1)}
TRANSFERS = {*SEND_OF, *(send for send, _ in SEND_OF.values())}

# Tolerance in seconds: times are differences of numbers of about 1e5.
ROUNDING = 1e-9


def schedule_of_a_step(num_stages: int, num_microbatches: int) -> Schedule:
    """Returns the schedule of a step by default: all but the last micro-batch recompute."""
    return fill_drain(num_stages, num_microbatches, recomputed=range(num_microbatches - 1))


def step(pipe: GPipe, num_samples: int = 8) -> None:
    pipe(features(num_samples)).sum().backward()


@functools.cache
def warm_pipe(num_stages: int, chunks: int) -> GPipe:
    """Returns a pipeline that has run a step, so that the next step compiles nothing."""
    pipe = GPipe(mlp(), uneven_balance(5, num_stages), chunks=chunks)
    step(pipe)
    return pipe


def infer(pipe: GPipe, num_samples: int = 8) -> None:
    with torch.no_grad():
        pipe(features(num_samples))


def names(stage: tuple[Event, ...]) -> list[tuple[str, bool]]:
    return [(str(e.action), e.is_wait) for e in stage]


def expected_names(schedule: Schedule, stage: int) -> list[tuple[str, bool]]:
    """Returns the stage's actions in order, each transfer after the wait for it."""
    return [
        (str(a), is_wait)
        for a in schedule.stages[stage]
        for is_wait in ((True, False) if a.kind in TRANSFERS else (False,))
    ]


def check_events(recording: Recording, schedule: Schedule) -> None:
    """Checks that these are the events of one run, and that no wait ends before its send."""
    for stage, events in enumerate(recording.stages):
        assert names(events) == expected_names(schedule, stage)
        assert all(e.begin <= e.end for e in events)
        assert all(before.end <= after.begin for before, after in pairwise(events))
    latest, waits = (
        recording.latest,
        {e.action: e for events in recording.stages for e in events if e.is_wait},
    )
    for action in filter(lambda a: a.kind in SEND_OF, latest):
        kind, step_to_sender = SEND_OF[action.kind]
        send = latest[Action(action.stage + step_to_sender, kind, action.microbatch)]
        assert send.end <= waits[action].end, action


@pytest.mark.parametrize("num_stages", [1, 4])
def test_every_action_of_a_step_is_recorded_and_changes_no_bit(num_stages: int) -> None:
    model = mlp()
    pipe, schedule = GPipe(model, uneven_balance(5, num_stages), chunks=4), schedule_of_a_step(num_stages, 4)
    expected = loop_step(model, features(), 4)
    for _ in range(2):  # the first step compiles
        with pipe.recording() as recording:
            assert recording.stages == ()
            assert unequal(pipeline_step(pipe, features()), expected) == []
        check_events(recording, schedule)
        assert recording.phases() == [schedule.forward_part(), schedule.backward_part()]
        infer(pipe)
        assert not any(pipeline_of(pipe).events())


def test_an_inference_after_a_step_is_recorded_by_itself() -> None:
    """Stage 0 sends its fifth tensor after stage 1 has received the first, as there are four slots."""
    pipe = warm_pipe(3, 8)
    with pipe.recording() as recording:
        step(pipe)
        infer(pipe)
    assert recording.phases() == [fill_drain(3, 8, backward=False)]
    assert recording.span() >= recording.critical_path() - ROUNDING
    waits = {e.action: e for e in recording.stages[0][-24:] if e.is_wait}
    for m in range(4, 8):
        received = recording.latest[Action(1, Kind.RECV_F, m - 4)]
        assert received.end <= waits[Action(0, Kind.SEND_F, m)].end


def test_every_action_of_a_step_is_recorded_under_delays() -> None:
    pipe = warm_pipe(4, 8)
    for seed in range(4):
        inject_delays(pipe, seed, 300)
        with pipe.recording() as recording:
            step(pipe)
        remove_faults(pipe)
        check_events(recording, schedule_of_a_step(4, 8))
        assert recording.span() >= recording.critical_path() - ROUNDING


@pytest.mark.filterwarnings("ignore:.*stages idle")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_in_one_call_is_one_run(schedule: str) -> None:
    pipe, x = GPipe(mlp(), uneven_balance(5, 4), chunks=4, schedule=schedule), features()
    with pipe.recording() as recording:
        pipe.step(x, loss_fn=torch.sum, normalizer=1)
    (phase,) = recording.phases()
    assert len(phase.order()) == len(recording.latest)
    assert recording.span() >= recording.critical_path() - ROUNDING
    assert ": step " in str(recording)


def test_latest_holds_the_events_of_the_last_step() -> None:
    pipe, begin = warm_pipe(2, 2), time.monotonic()
    with pipe.recording() as recording:
        step(pipe)
        between = time.monotonic()
        step(pipe)
    times = [t for stage in recording.stages for e in stage for t in (e.begin, e.end)]
    assert begin <= min(times) <= max(times) <= time.monotonic()
    for stage, events in enumerate(recording.stages):
        assert names(events) == 2 * expected_names(schedule_of_a_step(2, 2), stage)
    assert all(e.begin >= between for e in recording.latest.values())
    assert min(e.begin for stage in recording.stages for e in stage) < between
    assert list(recording.latest) == list(chain(*schedule_of_a_step(2, 2).stages))


def test_a_block_records_replaced_layers_refuses_another_one_and_ends_with_an_exception() -> None:
    pipe = GPipe(mlp(), [2, 3], chunks=2)
    with pytest.raises(KeyError), pipe.recording() as recording:
        with pytest.raises(RuntimeError, match="being recorded already"), pipe.recording():
            pass
        setattr(pipe, "1", copy.deepcopy(pipe[1]))
        step(pipe)
        raise KeyError
    check_events(recording, schedule_of_a_step(2, 2))
    step(pipe)
    assert not any(pipeline_of(pipe).events())


@pytest.mark.parametrize("kept", [1, 7, 1000])
def test_a_bounded_recording_keeps_the_latest_events(kept: int) -> None:
    pipe = warm_pipe(3, 4)
    pipeline_of(pipe).record(kept)
    step(pipe)
    step(pipe)
    for stage, events in enumerate(pipeline_of(pipe).events()):
        every = expected_names(schedule_of_a_step(3, 4), stage) * 2
        assert [(name, is_wait) for name, is_wait, *_ in events] == every[-kept:]
        assert [begin for _, _, begin, *_ in events] == sorted(begin for _, _, begin, *_ in events)
    pipeline_of(pipe).record(0)
    assert not any(pipeline_of(pipe).events())
    with pytest.raises(ValueError, match="cannot keep -1 events"):
        pipeline_of(pipe).record(-1)


def parse_recording(text: str) -> Recording:
    """Parses one row per stage, of actions with begin and end in seconds; ~ marks a wait."""

    def events(row: str) -> Iterator[Event]:
        for cell in row.split(","):
            name, begin, end = cell.split()
            action = Action.parse(name.lstrip("~"))
            run = int(action.kind in IN_BACKWARD)
            yield Event(action, name.startswith("~"), float(begin), float(end), run)

    recording = Recording()
    recording.stages = tuple(tuple(events(row)) for row in text.splitlines())
    return recording


# Critical path 13 s: 0F0 0SEND_F0 1RECV_F0 1F0 1RECV_F1 1F1 take 2 + 1 + 1 + 4 + 1 + 4; 1 s is lost.
FORWARD = (
    "0F0 0.5 2.5, ~0SEND_F0 2.5 2.5, 0SEND_F0 2.5 3.5, 0F1 3.5 4.5, ~0SEND_F1 4.5 4.5, 0SEND_F1 4.5 5.5",
    "~1RECV_F0 0 4.5, 1RECV_F0 4.5 5.5, 1F0 5.5 9.5, ~1RECV_F1 9.5 9.5, 1RECV_F1 9.5 10.5, 1F1 10.5 14.5",
)
# Critical path 11 s: 1B1 1SEND_B1 1B0 1SEND_B0 0RECV_B0 0B0 take 3 + 1 + 3 + 1 + 1 + 2; 1 s is lost.
BACKWARD = (
    "~0RECV_B1 100 104, 0RECV_B1 104 105, 0B1 105 106, ~0RECV_B0 106 109, 0RECV_B0 109 110, 0B0 110 112",
    "1B1 100 103, ~1SEND_B1 103 103, 1SEND_B1 103 104, 1B0 104 107, ~1SEND_B0 107 107, 1SEND_B0 107 108",
)
STEP = tuple(", ".join(rows) for rows in zip(FORWARD, BACKWARD, strict=True))


def test_figures_of_a_step_exclude_the_time_between_forward_and_backward() -> None:
    recording = parse_recording("\n".join(STEP))
    assert recording.phases() == [fill_drain(2, 2).forward_part(), fill_drain(2, 2).backward_part()]
    assert list(recording.seconds().values())[:4] == [2, 1, 1, 1]
    assert recording.span() == 14 + 12
    assert recording.critical_path() == 13 + 11
    assert recording.bubble() == pytest.approx(1 - (3 + 8 + 3 + 6) / (2 * 26))


def test_incomplete_empty_and_failed_recordings_have_no_figures() -> None:
    pipe = warm_pipe(3, 2)
    with pipe.recording() as empty:
        pass
    assert empty.stages == ((), (), ())
    inject_failure(pipe, "1F1")
    with pipe.recording() as failed, pytest.raises(ValueError, match="injected"):
        step(pipe)
    remove_faults(pipe)
    assert "1F1" not in map(str, failed.latest)
    incomplete = [
        BACKWARD,
        (FORWARD[0], FORWARD[1].rpartition(",")[0]),  # the last forward is missing
        (FORWARD[0].rpartition(",")[0], FORWARD[1]),  # the last send is missing
        (STEP[0], FORWARD[1]),  # the backward of one stage
    ]
    for recording in (empty, failed, *(parse_recording("\n".join(rows)) for rows in incomplete)):
        for figure in (recording.phases, recording.span, recording.bubble, recording.critical_path):
            with pytest.raises(ValueError):
                figure()


def test_a_recording_prints_a_summary() -> None:
    """Stage 1 waits for 4 s of the forward, which begins with the first action at 0.5 s."""
    recording = parse_recording("\n".join(FORWARD))
    text = str(recording)
    assert text.startswith("Report: K = 2 stages, M = 2 micro-batches: forward 14000.0 ms, bubble 60.7%")
    (line,) = (line for line in text.splitlines() if line.startswith("1 "))
    assert line.split()[1::2] == ["8000.000", "4000.000", "57.1%"]  # busy, waiting
    recording.kernels = ("add", "mul"), ()
    assert str(recording) == f"{text}\n\nstage 0 launches add, mul"
    how = "call the model inside 'with model.recording() as recording:', and read it after the block"
    assert str(Recording()) == f"Recording: the recording holds no step: {how}"


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
