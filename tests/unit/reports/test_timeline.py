"""Timelines, gaps and the memory of recorded steps."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.reports.blame import CAUSES
from gpipe_fast.reports.report import Report
from gpipe_fast.schedule import SCHEDULES, TRANSFERS
from tests.models import features, mlp, uneven_balance

pytestmark = pytest.mark.filterwarnings("ignore:.*stages idle")


def report_of(pipe: GPipe, x: torch.Tensor, step: bool = False) -> Report:
    for _ in range(2):
        with pipe.recording() as recording:
            if step:
                pipe.step(x, loss_fn=torch.sum, normalizer=1)
            else:
                pipe(x).sum().backward()
    return recording.report()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_blocks_and_idle_time_fill_each_row(schedule: str) -> None:
    pipe = GPipe(mlp(), uneven_balance(5, 4), chunks=4, schedule=schedule)
    report = report_of(pipe, features(), step=True)
    found = report.timeline()
    assert len(found["stages"]) == report.num_ranks
    assert found["end"] == pytest.approx(report.step)
    assert [sum(stage) for stage in report.stages] == pytest.approx([report.step] * 4, rel=1e-6)
    parts: defaultdict[str, float] = defaultdict(float)
    transfers = {kind.value for kind in TRANSFERS}
    for row in found["stages"]:
        spans = [(a["begin"], a["end"]) for a in row["actions"] if a["kind"] not in transfers]
        spans += [(idle["begin"], idle["end"]) for idle in row["idle"]]
        now = 0.0
        for begin, end in sorted(spans):
            assert begin == pytest.approx(now, abs=1e-8)
            now = end
        assert now == pytest.approx(found["end"], abs=1e-8)
        assert all(0 <= wait["begin"] <= wait["end"] for wait in row["waits"])
        for idle in row["idle"]:
            parts[idle["cause"]] += idle["end"] - idle["begin"]
    total = sum(parts.values())
    assert {cause: parts[cause] / total for cause in CAUSES} == pytest.approx(report.blame, abs=0.01)
    assert len(found["arrows"]) == 2 * 3 * 4
    assert all(arrow["from"][1] <= arrow["to"][1] for arrow in found["arrows"])
    names = [a["name"] for row in found["stages"] for a in row["actions"]]
    assert sorted(names) == sorted(str(action) for phase in report.phases for action in phase.events)
    critical = {a["name"] for row in found["stages"] for a in row["actions"] if a["critical"]}
    assert critical == {str(action) for action in report.critical_path}
    assert found["between"] == []


def tanh_layers() -> nn.Sequential:
    """Each backward reads the input of the linear layer and the output of tanh, which is the next input."""
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh())


@pytest.mark.parametrize(
    ("checkpoint", "boundary", "saved"),
    [
        # Four micro-batches of 2 x 16 and 2 x 32 numbers; each keeps tanh's output, of 2 x 32 and 2 x 16.
        ("never", [512, 1024], [1024, 512]),
        ("except_last", [512, 1024], [256, 128]),
        ("always", [512, 1024], [0, 0]),
    ],
)
def test_memory_by_kind(checkpoint: str, boundary: list[int], saved: list[int]) -> None:
    pipe = GPipe(tanh_layers(), [2, 2], chunks=4, checkpoint=checkpoint)
    report = report_of(pipe, torch.randn(8, 16))
    assert [own.parameters for own in report.memory] == [4 * (16 * 32 + 32), 4 * (32 * 16 + 16)]
    assert [own.gradients for own in report.memory] == [own.parameters for own in report.memory]
    assert [own.boundary for own in report.memory] == boundary
    assert [own.saved for own in report.memory] == saved
    for row, kept in zip(report.timeline()["stages"], zip(boundary, saved, strict=True), strict=True):
        assert max(number for _, number in row["memory"]) == sum(kept)
        assert row["memory"][-1][1] == 0
    assert "512 B" in str(report)
    assert report.to_dict()["memory"][0]["saved"] == saved[0]


def test_pages_and_traces_are_written(tmp_path: Path) -> None:
    report = report_of(GPipe(mlp(), [2, 3], chunks=4), features())
    assert [sum(stage) for stage in report.stages] == pytest.approx([report.step] * 2, rel=1e-6)
    report = replace(report, others="Other programs are running.", withheld=("another balance",))
    report.save(tmp_path / "step.html", title="A <title>")
    page = (tmp_path / "step.html").read_text()
    assert "A &lt;title&gt;" in page
    assert report.headline() in page
    assert "Other programs are running. The causes" in page
    assert "No gain is predicted of another balance" in page
    (loss,) = report.timeline()["between"]
    assert loss[1] - loss[0] == pytest.approx(report.between)
    report.save(tmp_path / "STEP.JSON")
    events = json.loads((tmp_path / "STEP.JSON").read_text())["traceEvents"]
    assert [e["dur"] / 1e6 for e in events if e["name"] == "loss"] == pytest.approx([report.between])


def test_memory_does_not_depend_on_what_ran_before() -> None:
    pipe, x, y = GPipe(tanh_layers(), [2, 2], chunks=8), torch.randn(16, 16), torch.zeros(16, 16)
    first, second = (pipe.report(x, target=y, loss_fn=nn.functional.mse_loss).memory for _ in range(2))
    assert first == second
