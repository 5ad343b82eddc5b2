"""Reports of recordings whose times are known; test_timeline.py has real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpipe_fast.recording import Event, Recording
from gpipe_fast.schedule import TRANSFERS, simulate

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
