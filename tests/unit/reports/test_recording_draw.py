"""`draw`: recordings without a step are refused, and the drawing is written to a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpipe_fast import GPipe
from gpipe_fast.picture import draw
from tests.models import mlp
from tests.unit.reports.test_picture import simulate


def test_an_empty_recording_is_refused() -> None:
    pipe = GPipe(mlp(), [2, 3], chunks=4)
    with pipe.recording() as recording:
        pass
    with pytest.raises(ValueError, match="the recording holds no step"):
        draw(recording)


def test_a_recording_of_part_of_a_step_is_refused() -> None:
    recording = simulate(2, 4)
    recording.stages = tuple(row[1:] for row in recording.stages)
    with pytest.raises(ValueError, match="stage 0 does"):
        draw(recording)


def test_the_drawing_is_written_to_a_path(tmp_path: Path) -> None:
    recording = simulate(2, 3)
    for path in (tmp_path / "step.svg", str(tmp_path / "STEP.SVG")):
        returned = draw(recording, path, title="saved")
        assert Path(path).read_text(encoding="utf-8") == returned == draw(recording, title="saved")
    for name in ("step.png", "step"):
        with pytest.raises(ValueError, match=r"the path must end in \.svg, got '.*step"):
            draw(recording, tmp_path / name)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["STEP.SVG", "step.svg"]
