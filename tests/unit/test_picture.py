"""Drawings of recorded steps: valid SVG, boxes in place and within the drawing, labels that fit."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gpipe_fast.picture import draw
from gpipe_fast.reports.events import Event
from gpipe_fast.reports.recording import Recording
from gpipe_fast.schedule import TRANSFERS, Action, Kind, fill_drain

pytestmark = pytest.mark.usefixtures("one_thread")

START = 1e5  # seconds; clocks do not start at 0
ROUNDING = 0.011  # pixels; coordinates have two decimals


def simulate(
    num_stages: int,
    num_microbatches: int,
    milliseconds: tuple[float, float] = (10.0, 30.0),
    loss: float = 5.0,
    backward: bool = True,
    recomputed: Collection[int] | None = None,
) -> Recording:
    """Returns the recording of an ideal step, whose forwards and backwards take `milliseconds` each."""
    schedule = fill_drain(num_stages, num_microbatches, backward=backward, recomputed=recomputed)
    durations = dict(zip((Kind.F, Kind.B), milliseconds, strict=True))
    durations |= dict.fromkeys((Kind.R, Kind.I, Kind.W), milliseconds[1] / 3)
    stages: list[list[Event]] = [[] for _ in range(num_stages)]
    begin = START
    for run, part in enumerate([schedule.forward_part(), *([schedule.backward_part()] if backward else [])]):

        def seconds(action: Action) -> float:
            return durations.get(action.kind, 0.0) * 1e-3

        ends = part.times(seconds)
        for row, actions in zip(stages, part.stages, strict=True):
            for a in actions:
                end = begin + ends[a]
                row.append(Event(a, False, end - seconds(a), end, run))
        begin += max(ends.values()) + loss * 1e-3
    recording = Recording()
    recording.stages = tuple(tuple(row) for row in stages)
    return recording


@dataclass
class Box:
    left: float
    top: float
    right: float
    bottom: float
    name: str = ""


class Drawing:
    """The elements of an SVG file, in document order."""

    def __init__(self, svg: str) -> None:
        self.root = ElementTree.fromstring(svg)
        assert self.root.tag == "{http://www.w3.org/2000/svg}svg"
        self.width, self.height = float(self.root.attrib["width"]), float(self.root.attrib["height"])
        assert self.root.attrib["viewBox"] == f"0 0 {self.width:.0f} {self.height:.0f}"

    def _all(self, tag: str, parent: ElementTree.Element | None = None) -> list[ElementTree.Element]:
        return list((self.root if parent is None else parent).iter(f"{{http://www.w3.org/2000/svg}}{tag}"))

    def boxes(self, kind: str | None = None, parent: ElementTree.Element | None = None) -> list[Box]:
        found = []
        for rect in self._all("rect", parent):
            x, y, width, height = (float(rect.get(k, 0)) for k in ("x", "y", "width", "height"))
            assert width >= 0
            assert height > 0
            if kind in (None, rect.get("class")):
                title = "".join(t.text or "" for t in self._all("title", rect))
                found.append(Box(x, y, x + width, y + height, title))
        return found

    def stages(self) -> list[list[Box]]:
        """Returns each stage's blocks from left to right, named by their tooltips."""
        groups = [g for g in self._all("g") if g.get("class") == "stage"]
        blocks = [[box for kind in "FRBIW" for box in self.boxes(kind, g)] for g in groups]
        return [sorted(row, key=lambda box: (box.left, box.right)) for row in blocks]

    def texts(self, parent: ElementTree.Element | None = None) -> list[Box]:
        """Returns the boxes of texts, whose widths are those of a monospaced font."""
        found = []
        for text in self._all("text", parent):
            size, x, y = (float(text.attrib[k]) for k in ("font-size", "x", "y"))
            width = 0.602 * size * len(text.text or "")
            left = x - width / 2 if text.get("text-anchor") == "middle" else x
            found.append(Box(left, y - size, left + width, y + 0.3 * size, text.text or ""))
        return found

    def words(self) -> list[str]:
        return [text.name for text in self.texts()]


def within(inner: Box, outer: Box) -> bool:
    return (
        outer.left - ROUNDING <= inner.left
        and inner.right <= outer.right + ROUNDING
        and outer.top - ROUNDING <= inner.top
        and inner.bottom <= outer.bottom + ROUNDING
    )


def check(recording: Recording) -> Drawing:
    """Draws a recording, asserts what must hold for every drawing, and returns the drawing."""
    drawing = Drawing(draw(recording))
    canvas = Box(0, 0, drawing.width, drawing.height)
    for box in (*drawing.boxes(), *drawing.texts()):
        assert within(box, canvas), box
    rows = drawing.stages()
    assert len(rows) == len(recording.stages)
    for stage, row in enumerate(rows):
        blocks = [e for a, e in recording.latest.items() if a.stage == stage and a.kind not in TRANSFERS]
        assert [box.name.partition(":")[0] for box in row] == [str(e.action) for e in blocks]
        for before, after in pairwise(row):
            assert before.right <= after.left + 1e-9
        assert len({(box.top, box.bottom) for box in row}) == 1
    for above, below in pairwise(rows):
        assert above[0].bottom < below[0].top
    for text in drawing.texts():
        if re.fullmatch("[FRBIW][0-9]+", text.name):
            assert sum(within(text, box) for row in rows for box in row) == 1, text
    return drawing


def labels(drawing: Drawing) -> list[str]:
    return [word for word in drawing.words() if re.fullmatch("[FRBIW][0-9]+", word)]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (4, 16), (3, 5)])
def test_every_block_has_its_label(num_stages: int, num_microbatches: int) -> None:
    drawing = check(simulate(num_stages, num_microbatches))
    expected = [f"{kind}{m}" for kind in "FB" for m in range(num_microbatches)] * num_stages
    assert sorted(labels(drawing)) == sorted(expected)
    assert drawing.width < 2000


def test_blocks_are_drawn_to_scale() -> None:
    """K = 2, M = 2; in ms, forwards take 10, the loss 5 and backwards 30; the first backward starts at 35."""
    drawing = check(simulate(2, 2))
    first, second = drawing.stages()
    scale = (first[0].right - first[0].left) / 10
    expected = [[(0, 10), (10, 20), (65, 95), (95, 125)], [(10, 20), (20, 30), (35, 65), (65, 95)]]
    for row, times in zip((first, second), expected, strict=True):
        for box, (begin, end) in zip(row, times, strict=True):
            assert box.left - first[0].left == pytest.approx(begin * scale, abs=0.02)
            assert box.right - first[0].left == pytest.approx(end * scale, abs=0.02)
    assert first[2].name == "0B1: 30.000 ms, from 65.000 ms"
    loss = drawing.boxes("loss")
    assert len(loss) == 1
    assert (loss[0].left, loss[0].right) == (second[1].right, second[2].left)
    assert loss[0].top <= first[0].top
    assert loss[0].bottom >= second[0].bottom
    assert drawing.words()[1:4] == ["forward", "backward", "idle: fill and drain"]
    ticks = [t for t in drawing.texts() if re.fullmatch(r"[0-9.]+( ms)?", t.name)]
    assert ticks[0].name == "0 ms"
    for tick in ticks:
        expected_at = float(tick.name.removesuffix(" ms")) * scale
        assert (tick.left + tick.right) / 2 - first[0].left == pytest.approx(expected_at, abs=0.03)


def test_the_caption_gives_step_time_and_bubble() -> None:
    """The bubble is (K - 1)/(M + K - 1) = 1/9 of 9 x 40 ms; the loss, 7 ms, is no part of the step."""
    (line,) = [word for word in check(simulate(2, 8, loss=7.0)).words() if word.startswith("K = ")]
    step, loss = "step 360.0 ms, bubble 11.1%, (K-1)/(M+K-1) = 11.1% for equal stages", "loss 7.0 ms"
    assert line == f"K = 2 stages, M = 8 micro-batches: {step}; {loss}"


def test_parts_of_a_backward_have_a_colour_and_a_legend_entry_each() -> None:
    drawing = check(simulate(2, 8, recomputed=range(8)))
    assert len({r.get("fill") for r in drawing.root.iter() if r.get("class") in [*"FRBIW"]}) == 5
    meanings = ["forward", "recompute", "backward", "backward to the boundary gradient", "weight gradients"]
    assert drawing.words()[1:6] == meanings


def test_a_title_is_escaped_and_widens_the_drawing() -> None:
    title = "<b> & \"so\" 'on' </text> " + "long " * 60
    drawing = Drawing(draw(simulate(2, 2), title=title))
    assert drawing.words()[0] == title
    assert drawing.texts()[0].right <= drawing.width
    assert draw(simulate(2, 2)) == draw(simulate(2, 2), title="")


def test_the_drawing_is_written_to_a_path(tmp_path: Path) -> None:
    recording = simulate(2, 3)
    for path in (tmp_path / "step.svg", str(tmp_path / "STEP.SVG")):
        returned = draw(recording, path, title="saved")
        assert Path(path).read_text(encoding="utf-8") == returned == draw(recording, title="saved")
    for name in ("step.png", "step"):
        with pytest.raises(ValueError, match=r"the path must end in \.svg, got '.*step"):
            draw(recording, tmp_path / name)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["STEP.SVG", "step.svg"]
