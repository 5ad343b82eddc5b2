"""Timelines, gaps and the memory of recorded steps."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.reports import page
from gpipe_fast.reports.blame import CAUSES
from gpipe_fast.reports.chart import BLOCK_COLOURS, CAUSE_COLOURS
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
    assert len(found.rows) == report.num_ranks
    assert sorted(stage for row in found.rows for stage in row.stages) == [0, 1, 2, 3]
    assert found.seconds == pytest.approx(report.step)
    parts: defaultdict[str, float] = defaultdict(float)
    for row in found.rows:
        spans = [span for action, span in row.blocks if action.kind not in TRANSFERS]
        spans += [span for _, span in row.idle]
        now = 0.0
        for span in sorted(spans):
            assert span.begin == pytest.approx(now, abs=1e-8)
            now = span.end
        assert now == pytest.approx(found.seconds, abs=1e-8)
        assert all(0 <= span.begin <= span.end for _, span in row.waits)
        for cause, span in row.idle:
            parts[cause] += span.end - span.begin
    total = sum(parts.values())
    assert {cause: parts[cause] / total for cause in CAUSES} == pytest.approx(report.blame, abs=0.01)
    assert len(found.arrows) == 2 * 3 * 4
    assert all(arrow.begin <= arrow.end for arrow in found.arrows)


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
    for row, kept in zip(report.timeline().rows, zip(boundary, saved, strict=True), strict=True):
        assert max(number for _, number in row.memory) == sum(kept)
        assert row.memory[-1][1] == 0
    assert "512 B" in str(report)
    assert report.to_dict()["memory"][0]["saved"] == saved[0]


def test_pages_and_pictures_are_written(tmp_path: Path) -> None:
    report = report_of(GPipe(mlp(), [2, 3], chunks=4), features())
    for name in ("step.html", "step.svg"):
        report.save(tmp_path / name, title="A <title>")
    assert "A &lt;title&gt;" in (tmp_path / "step.html").read_text()
    assert report.headline() in (tmp_path / "step.html").read_text()
    assert "A &lt;title&gt;" in (tmp_path / "step.svg").read_text()
    assert CAUSE_COLOURS["fill and drain"] in (tmp_path / "step.svg").read_text()


def test_the_page_has_the_colours_of_the_picture() -> None:
    css = (Path(page.__file__).parent / "page.css").read_text()
    for kind, colour in BLOCK_COLOURS.items():
        assert f"--{kind.value}: {colour};" in css
    for cause, colour in CAUSE_COLOURS.items():
        assert f"--cause-{cause.replace(' ', '-')}: {colour};" in css


def test_memory_does_not_depend_on_what_ran_before() -> None:
    pipe, x, y = GPipe(tanh_layers(), [2, 2], chunks=8), torch.randn(16, 16), torch.zeros(16, 16)
    first, second = (pipe.report(x, target=y, loss_fn=nn.functional.mse_loss).memory for _ in range(2))
    assert first == second
