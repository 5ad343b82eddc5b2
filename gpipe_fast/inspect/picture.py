"""A timeline of a recorded step as SVG: one row per stage, one block per action except transfers."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from gpipe_fast.runtime.events import Event
from gpipe_fast.runtime.recording import Recording
from gpipe_fast.schedule import BACKWARD, Kind, bubble

# Sizes in pixels.
_MARGIN, _LABEL_WIDTH, _ROW_HEIGHT, _ROW_GAP, _LINE_HEIGHT = 20, 62, 30, 6, 20
_ROW_WIDTH_LIMITS = (800, 1900)  # limits of the width of rows, which is chosen such that most names fit
_TITLE_SIZE, _TEXT_SIZE, _NAME_SIZE = 13, 11, 10
_LETTER_WIDTH = 0.62  # width of a letter in common monospaced fonts, relative to the font size
_TICK_DISTANCE = 80  # the minimum

_BLOCK_COLOURS = {
    Kind.F: "#9ecae9",
    Kind.R: "#c7e9c0",
    Kind.B: "#f7a650",
    Kind.I: "#f9b97a",
    Kind.W: "#fcdcbb",
}
_MEANINGS = {
    Kind.F: "forward",
    Kind.R: "recompute",
    Kind.B: "backward",
    Kind.I: "backward to the boundary gradient",
    Kind.W: "weight gradients",
}
_TEXT_COLOUR, _IDLE_COLOUR, _LINE_COLOUR = "#222222", "#eeeeee", "#aaaaaa"
_HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<rect width="6" height="6" fill="#ffffff"/><rect width="2" height="6" fill="{_LINE_COLOUR}"/></pattern>'
)


def draw(recording: Recording, path: str | os.PathLike[str] | None = None, *, title: str = "") -> str:
    """Draws the latest step of a recording, or its latest forward if no backward followed.

    Time runs to the right, to scale. Grey is idle time (the bubble); the hatched area between forward and
    backward is the caller's loss. A block has a label if it fits, and a tooltip with its times. Transfers
    take microseconds and are not drawn.

    Args:
        recording: the result of a ``with model.recording() as recording`` block that has ended.
        path: the file to write, ending in ``.svg``; by default none.
        title: a line of text above the figures.

    Returns:
        The SVG document as a string.

    Raises:
        TypeError: ``recording`` is not a `Recording`.
        ValueError: the recording holds no complete step, or the path does not end in ``.svg``.
        OSError: the file cannot be written.
    """
    if not isinstance(recording, Recording):
        raise TypeError(
            "draw takes the Recording of a 'with model.recording() as recording:' block, got "
            f"{type(recording).__name__}"
        )
    if path is not None and Path(path).suffix.lower() != ".svg":
        raise ValueError(f"drawings are SVG files: the path must end in .svg, got {str(path)!r}")
    if not recording.latest:
        raise ValueError("the recording holds no step: call the model inside its block, and draw after it")
    lines = [*([title] if title else []), _summary(recording)]
    chart = _Chart(recording, top=_MARGIN + _LINE_HEIGHT * (len(lines) + 2))
    widest = max(_text_width(line, _TITLE_SIZE) for line in lines)
    width, height = math.ceil(max(chart.right, _MARGIN + widest) + _MARGIN), chart.bottom + 2 * _LINE_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="DejaVu Sans Mono, monospace" fill="{_TEXT_COLOUR}">',
        _HATCH,
        _rectangle(0, 0, width, height, "#ffffff"),
        *(
            _text(_MARGIN, _MARGIN + _LINE_HEIGHT * (i + 0.5), line, _TITLE_SIZE)
            for i, line in enumerate(lines)
        ),
        *_legend(_MARGIN + _LINE_HEIGHT * len(lines), [kind for kind in _BLOCK_COLOURS if chart.has(kind)]),
        *chart.rows(),
        *chart.loss(),
        *chart.axis(),
        "</svg>",
    ]
    drawing = "\n".join(parts) + "\n"
    if path is not None:
        Path(path).write_text(drawing, encoding="utf-8")
    return drawing


def _summary(recording: Recording) -> str:
    num_stages, num_microbatches = len(recording.stages), recording.phases()[0].num_microbatches
    begin, end = _begin_and_end(list(recording.latest.values()))
    between = end - begin - recording.span()
    return (
        f"K = {num_stages} stages, M = {num_microbatches} micro-batches: "
        f"{'step' if recording.has_backward else 'forward'} {recording.span() * 1e3:.1f} ms, "
        f"bubble {recording.bubble():.1%}, (K-1)/(M+K-1) = {bubble(num_stages, num_microbatches):.1%}"
        + (f"; loss {between * 1e3:.1f} ms" if len(recording.phases()) > 1 else "")
    )


class _Chart:
    """The layout of rows, loss and axis.

    Attributes:
        right: the x coordinate of the end of the rows.
        bottom: the y coordinate of the end of the last row.
    """

    def __init__(self, recording: Recording, top: float) -> None:
        self._events = recording.latest
        self._has_loss = len(recording.phases()) > 1
        self._num_stages = len(recording.stages)
        self._begin, self._end = _begin_and_end(list(self._events.values()))
        self._top = top
        self._left = _MARGIN + _LABEL_WIDTH
        self._scale = self._pixels_per_second()
        self.right = self._x(self._end)
        self.bottom = top + self._num_stages * (_ROW_HEIGHT + _ROW_GAP) - _ROW_GAP

    def _pixels_per_second(self) -> float:
        """Returns the scale at which nine of ten labels fit into their blocks, within the limits of width."""
        needed = sorted(
            (_text_width(_label(event), _NAME_SIZE) + 3) / max(event.end - event.begin, 1e-9)
            for event in self._blocks()
        )
        seconds = max(self._end - self._begin, 1e-9)
        lowest, highest = (width / seconds for width in _ROW_WIDTH_LIMITS)
        return min(max(needed[len(needed) * 9 // 10], lowest), highest)

    def _x(self, seconds: float) -> float:
        return round(self._left + (seconds - self._begin) * self._scale, 2)

    def _blocks(self, kinds: Collection[Kind] = tuple(_BLOCK_COLOURS)) -> list[Event]:
        return [event for action, event in self._events.items() if action.kind in kinds]

    def has(self, kind: Kind) -> bool:
        """Returns whether there are blocks of this kind."""
        return bool(self._blocks([kind]))

    def rows(self) -> Iterator[str]:
        """Yields the label, the grey background and the blocks of every stage."""
        for stage in range(self._num_stages):
            top = self._top + stage * (_ROW_HEIGHT + _ROW_GAP)
            yield f'<g class="stage" id="stage{stage}">'
            yield _text(_MARGIN, top + _ROW_HEIGHT / 2, f"stage {stage}", _TEXT_SIZE)
            yield _rectangle(self._left, top, self.right, top + _ROW_HEIGHT, _IDLE_COLOUR)
            for event in self._blocks():
                if event.action.stage == stage:
                    yield from self._block(event, top)
            yield "</g>"

    def _block(self, event: Event, top: float) -> Iterator[str]:
        left, right = self._x(event.begin), self._x(event.end)
        begin, taken = (event.begin - self._begin) * 1e3, (event.end - event.begin) * 1e3
        tooltip = f"{event.action}: {taken:.3f} ms, from {begin:.3f} ms"
        kind = event.action.kind
        yield _rectangle(
            left, top, right, top + _ROW_HEIGHT, _BLOCK_COLOURS[kind], tooltip=tooltip, kind=kind.value
        )
        if _text_width(_label(event), _NAME_SIZE) <= right - left:
            yield _text((left + right) / 2, top + _ROW_HEIGHT / 2, _label(event), _NAME_SIZE, "middle")

    def loss(self) -> Iterator[str]:
        """Yields the area between forward and backward, if the caller computed the loss there."""
        if not self._has_loss:
            return
        backward = self._blocks([kind for kind in _BLOCK_COLOURS if kind in BACKWARD])
        left = self._x(max(event.end for event in self._blocks([Kind.F])))
        right = self._x(min(event.begin for event in backward))
        yield _rectangle(
            left, self._top - _ROW_GAP / 2, right, self.bottom + _ROW_GAP / 2, "url(#hatch)", kind="loss"
        )
        yield _text((left + right) / 2, self._top - _LINE_HEIGHT / 2, "loss", _TEXT_SIZE, "middle")

    def axis(self) -> Iterator[str]:
        """Yields the time axis, in milliseconds since the first action began."""
        y = self.bottom + _ROW_GAP
        yield _line(self._left, y, self.right, y)
        step = _round_up(_TICK_DISTANCE / self._scale * 1e3)
        decimals = max(0, -math.floor(math.log10(step)))
        for tick in range(math.floor((self._end - self._begin) * 1e3 / step) + 1):
            x = self._x(self._begin + tick * step * 1e-3)
            yield _line(x, y, x, y + 4)
            number = f"{tick * step:.{decimals}f}" if tick else "0 ms"
            if x + _text_width(number, _TEXT_SIZE) / 2 <= self.right + _MARGIN:
                yield _text(x, y + 4 + _LINE_HEIGHT / 2, number, _TEXT_SIZE, "middle")


def _begin_and_end(events: list[Event]) -> tuple[float, float]:
    return min(event.begin for event in events), max(event.end for event in events)


def _label(event: Event) -> str:
    return f"{event.action.kind.value}{event.action.microbatch}"


def _round_up(number: float) -> float:
    """Returns the least number of the form 1, 2 or 5 times a power of ten that is not below `number`."""
    power: float = 10.0 ** math.floor(math.log10(number))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= number * (1 - 1e-9))


def _legend(top: float, kinds: list[Kind]) -> Iterator[str]:
    x, y = float(_MARGIN), top + _LINE_HEIGHT / 2
    for fill, meaning in [
        *((_BLOCK_COLOURS[kind], _MEANINGS[kind]) for kind in kinds),
        (_IDLE_COLOUR, "idle"),
    ]:
        yield _rectangle(x, y - 5, x + 10, y + 5, fill)
        yield _text(x + 15, y, meaning, _TEXT_SIZE)
        x += 15 + _text_width(meaning, _TEXT_SIZE) + 20


def _text_width(text: str, size: float) -> float:
    return len(text) * size * _LETTER_WIDTH


def _text(x: float, y: float, text: str, size: int, anchor: str = "start") -> str:
    """Returns a text element that is vertically centred at ``y``."""
    place = f'x="{x:.2f}" y="{y + 0.36 * size:.2f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(text)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{_LINE_COLOUR}"/>'


def _rectangle(
    left: float, top: float, right: float, bottom: float, fill: str, *, tooltip: str = "", kind: str = ""
) -> str:
    place = f'x="{left:.2f}" y="{top:.2f}" width="{right - left:.2f}" height="{bottom - top:.2f}"'
    name = f' class="{kind}"' if kind else ""
    # A white outline separates a block from its neighbours.
    outline = ' stroke="#ffffff" stroke-width="0.5"' if tooltip else ""
    title = f"<title>{escape(tooltip)}</title>" if tooltip else ""
    return f'<rect{name} {place} fill="{fill}"{outline}>{title}</rect>'
