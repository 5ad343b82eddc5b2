"""Reports of recordings whose times are known, and of real ones."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_fast import GPipe
from gpipe_fast.recording import Event, Recording, Report
from gpipe_fast.schedule import SCHEDULES, TRANSFERS, Kind, simulate
from tests.models import features, mlp, uneven_balance

pytestmark = pytest.mark.filterwarnings("ignore:.*stages idle")


def recorded(
    name: str, num_stages: int, num_microbatches: int, stretch: float = 1.0, **costs: Any
) -> Recording:
    """Returns a recording of a simulated step; every wait is recorded, and all times are stretched."""
    found = simulate(name, num_stages, num_microbatches, **costs)
    recording = Recording()
    stages: list[tuple[Event, ...]] = []
    for actions in found.schedule.stages:
        events, now = [], 0.0
        for action in actions:
            begin, end = found.begins[action] * stretch, found.ends[action] * stretch
            if action.kind in TRANSFERS:
                events.append(Event(action, True, 5 + now, 5 + begin, 1))
            events.append(Event(action, False, 5 + begin, 5 + begin + (end - begin) / stretch, 1))
            now = end
        stages.append(tuple(events))
    recording.stages = tuple(stages)
    return recording


def shares(report: Report) -> dict[str, float]:
    assert sum(report.blame.values()) == pytest.approx(1)
    return {cause: share for cause, share in report.blame.items() if share > 1e-9}


def test_equal_stages_wait_for_fill_and_drain_alone() -> None:
    report = recorded("gpipe", 4, 8, checkpoint="never", weights=0).report()
    assert report.step == pytest.approx(11 * 3)
    assert report.bubble == pytest.approx(3 / 11) == report.bubble_of_equal_stages
    assert shares(report) == pytest.approx({"fill and drain": 1})
    assert [stage.busy for stage in report.stages] == pytest.approx([24] * 4)
    assert report.busy_bound == pytest.approx(24)
    assert report.path_seconds == pytest.approx(33)


def test_a_slow_stage_is_an_imbalance() -> None:
    """Replays: 4 stages of mean times take 11 * 3.75; the slow one makes it 8 * 6 + 3 * 3."""
    report = recorded(
        "gpipe", 4, 8, checkpoint="never", weights=0, forward=[1, 1, 2, 1], backward=[2, 2, 4, 2]
    ).report()
    assert report.step == pytest.approx(57)
    idle = 4 * 57 - 8 * (3 + 3 + 6 + 3)
    imbalance = 4 * (57 - 11 * 3.75)
    expected = {"fill and drain": 1 - imbalance / idle, "imbalance": imbalance / idle}
    assert shares(report) == pytest.approx(expected)


def test_copies_and_lost_time_are_told_apart() -> None:
    copying = recorded("gpipe", 2, 4, checkpoint="never", weights=0, transfer=0.5).report()
    without = recorded("gpipe", 2, 4, checkpoint="never", weights=0).report()
    assert [stage.copying for stage in copying.stages] == pytest.approx([2, 2])
    idle = 2 * copying.step - 2 * 12
    assert shares(copying)["transfer"] == pytest.approx(2 * (copying.step - without.step) / idle)
    assert "host" not in shares(copying)
    lost = recorded("gpipe", 2, 4, stretch=1.25, checkpoint="never", weights=0).report()
    assert lost.path_seconds == pytest.approx(without.step)
    # The last action is not stretched itself.
    assert lost.step == pytest.approx(1.25 * 15 - 0.25 * 2)
    assert shares(lost)["host"] == pytest.approx(2 * (lost.step - 15) / (2 * lost.step - 24))


def test_waiting_for_recomputes_is_told_from_their_own_time() -> None:
    """Only stage 1 takes long for a recompute, so stage 0 waits for it."""
    report = recorded(
        "gpipe", 2, 4, checkpoint="always", weights=0, recompute=[0.0, 1.0], forward=1, backward=2
    ).report()
    without = recorded("gpipe", 2, 4, checkpoint="never", weights=0, forward=1, backward=2).report()
    assert report.recompute == pytest.approx(4)
    idle = 2 * report.step - 24 - 4
    assert shares(report)["recompute"] == pytest.approx((2 * (report.step - without.step) - 4) / idle)
    assert re.search(r"recompute, of the busy time +14.3%", str(report))


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_times_of_a_stage_add_up_to_the_step(schedule: str, checkpoint: str) -> None:
    pipe = GPipe(mlp(), uneven_balance(5, 4), chunks=4, schedule=schedule, checkpoint=checkpoint)
    for _ in range(2):
        with pipe.recording() as recording:
            pipe.step(features(), loss_fn=torch.sum, normalizer=1)
    report = recording.report()
    assert [sum(stage) for stage in report.stages] == pytest.approx([report.step] * 4, rel=1e-6)
    assert sum(report.blame.values()) == pytest.approx(1)
    assert report.between == 0
    assert report.num_ranks == (2 if schedule == "interleaved" else 4)
    assert report.path_seconds <= report.step * (1 + 1e-9)
    assert (report.recompute > 0) == (checkpoint == "always")
    with pipe.recording() as recording:
        pipe(features()).sum().backward()
    report = recording.report()
    assert [sum(stage) for stage in report.stages] == pytest.approx([report.step] * 4, rel=1e-6)
    assert report.between > 0
    assert report.num_ranks == 4
    assert f"; loss {report.between * 1e3:.1f} ms" in str(report)


def test_a_forward_alone_has_a_report() -> None:
    pipe = GPipe(mlp(), uneven_balance(5, 2), chunks=4)
    with torch.no_grad(), pipe.recording() as recording:
        pipe(features())
    report = recording.report()
    assert report.critical_path[0].kind is Kind.F
    assert {action.kind for action in report.critical_path} <= {Kind.F, Kind.SEND_F, Kind.RECV_F}


def test_a_recording_without_a_step_has_no_report() -> None:
    with pytest.raises(ValueError, match="the recording holds no step"):
        Recording().report()


def test_forms_of_a_report(tmp_path: Path) -> None:
    recording = recorded("1f1b", 3, 4)
    report = recording.report()
    values = json.loads(json.dumps(report.to_dict()))
    assert values["step"] == report.step
    assert values["blame"] == report.blame
    assert values["stages"][0]["busy"] == report.stages[0].busy
    assert values["critical_path"] == [str(action) for action in report.critical_path]
    assert report._repr_html_().count("<table>") == 3
    assert repr(report) == f"<Report: {report.headline()}>"
    report.save(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    blocks = [each for each in events if each["ph"] == "X"]
    assert len(blocks) == sum(map(len, recording.stages))
    assert min(each["ts"] for each in blocks) == 0
    longest = max(each["ts"] + each["dur"] for each in blocks)
    assert longest == pytest.approx(report.step * 1e6)
    begins = {each["id"]: each for each in events if each["ph"] == "s"}
    ends = {each["id"]: each for each in events if each["ph"] == "f"}
    assert begins.keys() == ends.keys() == set(range(2 * 2 * 4))
    assert all(abs(begins[i]["tid"] - ends[i]["tid"]) == 1 for i in begins)
    assert all(begins[i]["ts"] <= ends[i]["ts"] for i in begins)
    assert [each["args"]["name"] for each in events if each["ph"] == "M"] == ["stage 0", "stage 1", "stage 2"]


def test_events_of_other_runs_are_left_out() -> None:
    once, both = recorded("gpipe", 2, 2), recorded("gpipe", 2, 2)
    both.stages = tuple(
        (*(replace(e, begin=e.begin - 90, end=e.end - 90, run=0) for e in stage), *stage)
        for stage in once.stages
    )
    assert both.report().to_dict() == once.report().to_dict()
