"""The chart of a recorded step, to scale: a row for each rank, with its actions, and below what it keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from gpipe_fast.reports.blame import CAUSES
from gpipe_fast.reports.timeline import Row, Span, Timeline
from gpipe_fast.schedule import Action, Kind

# Sizes in pixels.
_MARGIN, _LABEL_WIDTH, _ROW_HEIGHT, _ROW_GAP, _LINE_HEIGHT = 20, 62, 30, 8, 20
_CURVE_HEIGHT = 18  # of a row's memory, below its blocks
_ROW_WIDTH_LIMITS = (800, 1900)  # limits of the width of rows, which is chosen such that most names fit
_TITLE_SIZE, _TEXT_SIZE, _NAME_SIZE = 13, 11, 10
_LETTER_WIDTH = 0.62  # width of a letter in common monospaced fonts, relative to the font size
_TICK_DISTANCE = 80  # the minimum
_MAX_ARROWS = 200  # more of them hide the blocks

# The pages have the same colours (page/page.css).
BLOCK_COLOURS = {
    Kind.F: "#9ecae9",
    Kind.R: "#c7e9c0",
    Kind.B: "#f7a650",
    Kind.I: "#f9b97a",
    Kind.W: "#fcdcbb",
}
_CAUSE_COLOURS = ("#dedbd4", "#f6e0a4", "#bfe3e0", "#dcebbd", "#dccff0", "#f4c9c9")
CAUSE_COLOURS = dict(zip(CAUSES, _CAUSE_COLOURS, strict=True))
_MEANINGS = {
    Kind.F: "forward",
    Kind.R: "recompute",
    Kind.B: "backward",
    Kind.I: "backward to the boundary gradient",
    Kind.W: "weight gradients",
}
_TEXT_COLOUR, _LINE_COLOUR, _CRITICAL_COLOUR, _CURVE_COLOUR = "#222222", "#aaaaaa", "#a3174f", "#dcd7f0"


def svg(found: Timeline, lines: Sequence[str]) -> str:
    """Returns a picture as an SVG document.

    Args:
        found: the step.
        lines: lines of text above it.
    """
    chart = _Chart(found, lines)
    canvas = _Canvas(chart.width, chart.height)
    chart.draw(canvas)
    return canvas.document()


class _Chart:
    """The layout of a picture.

    Attributes:
        width: of the picture.
        height: of the picture.
    """

    def __init__(self, found: Timeline, lines: Sequence[str]) -> None:
        self._found, self._lines = found, lines
        self._has_curves = any(row.memory for row in found.rows)
        self._peak = max((kept for row in found.rows for _, kept in row.memory), default=0)
        self._left = _MARGIN + _LABEL_WIDTH
        self._scale = self._pixels_per_second()
        self._right = self._x(found.seconds)
        text = max(_text_width(line, _TITLE_SIZE) for line in lines)
        self.width = math.ceil(max(self._right, _MARGIN + text) + _MARGIN)
        self._legend = list(self._placed_legend())
        self._top = self._legend[-1][1] + 2 * _LINE_HEIGHT
        self._row_height = _ROW_HEIGHT + (_CURVE_HEIGHT if self._has_curves else 0)
        self._bottom = self._top + len(found.rows) * (self._row_height + _ROW_GAP) - _ROW_GAP
        self.height = math.ceil(self._bottom + 2 * _LINE_HEIGHT)

    def draw(self, canvas: _Canvas) -> None:
        """Draws everything."""
        canvas.rectangle(0, 0, self.width, self.height, "#ffffff")
        for i, line in enumerate(self._lines):
            canvas.text(_MARGIN, _MARGIN + _LINE_HEIGHT * (i + 0.5), line, _TITLE_SIZE)
        self._draw_legend(canvas)
        for index, row in enumerate(self._found.rows):
            canvas.group(row.title)
            self._draw_row(canvas, row, self._row_top(index))
            canvas.group("")
        self._draw_arrows(canvas)
        for span in self._found.between:
            left, right = self._x(span.begin), self._x(span.end)
            canvas.hatch(left, self._top - _ROW_GAP / 2, right, self._bottom + _ROW_GAP / 2)
            canvas.text((left + right) / 2, self._top - _LINE_HEIGHT / 2, "loss", _TEXT_SIZE, centred=True)
        self._draw_axis(canvas)

    def _blocks(self) -> Iterator[tuple[Action, Span]]:
        for row in self._found.rows:
            yield from ((action, span) for action, span in row.blocks if action.kind in BLOCK_COLOURS)

    def _pixels_per_second(self) -> float:
        """Returns the scale at which nine of ten labels fit into their blocks, within the limits of width."""
        needed = sorted(
            (_text_width(_label(action), _NAME_SIZE) + 3) / max(span.end - span.begin, 1e-9)
            for action, span in self._blocks()
        )
        seconds = max(self._found.seconds, 1e-9)
        lowest, highest = (width / seconds for width in _ROW_WIDTH_LIMITS)
        return min(max(needed[len(needed) * 9 // 10], lowest), highest)

    def _x(self, seconds: float) -> float:
        return round(self._left + seconds * self._scale, 2)

    def _row_top(self, index: int) -> float:
        return self._top + index * (self._row_height + _ROW_GAP)

    def _legend_entries(self) -> Iterator[tuple[str, str]]:
        kinds = {action.kind for action, _ in self._blocks()}
        yield from ((fill, _MEANINGS[kind]) for kind, fill in BLOCK_COLOURS.items() if kind in kinds)
        causes = {cause for row in self._found.rows for cause, _ in row.idle}
        yield from ((fill, f"idle: {cause}") for cause, fill in CAUSE_COLOURS.items() if cause in causes)
        yield _CRITICAL_COLOUR, "critical path"
        if self._has_curves:
            yield _CURVE_COLOUR, f"kept for backwards, up to {_bytes(self._peak)}"

    def _placed_legend(self) -> Iterator[tuple[float, float, str, str]]:
        """Yields the place, colour and meaning of each entry, in lines of the picture's width."""
        x, y = float(_MARGIN), _MARGIN + _LINE_HEIGHT * (len(self._lines) + 0.5)
        for fill, meaning in self._legend_entries():
            width = 15 + _text_width(meaning, _TEXT_SIZE)
            if x + width > self.width - _MARGIN:
                x, y = float(_MARGIN), y + _LINE_HEIGHT
            yield x, y, fill, meaning
            x += width + 20

    def _draw_legend(self, canvas: _Canvas) -> None:
        for x, y, fill, meaning in self._legend:
            half = 1 if fill == _CRITICAL_COLOUR else 5
            canvas.rectangle(x, y - half, x + 10, y + half, fill)
            canvas.text(x + 15, y, meaning, _TEXT_SIZE)

    def _draw_row(self, canvas: _Canvas, row: Row, top: float) -> None:
        bottom = top + _ROW_HEIGHT
        canvas.text(_MARGIN, top + _ROW_HEIGHT / 2, row.title, _TEXT_SIZE)
        for cause, span in row.idle:
            left, right = self._x(span.begin), self._x(span.end)
            tooltip = f"idle because of {cause}: {(span.end - span.begin) * 1e3:.3f} ms"
            canvas.rectangle(left, top, right, bottom, CAUSE_COLOURS[cause], kind="idle", tooltip=tooltip)
        for action, span in row.blocks:
            if action.kind in BLOCK_COLOURS:
                self._draw_block(canvas, action, span, top)
        if row.memory:
            self._draw_curve(canvas, row.memory, bottom, bottom + _CURVE_HEIGHT)

    def _draw_block(self, canvas: _Canvas, action: Action, span: Span, top: float) -> None:
        left, right, bottom = self._x(span.begin), self._x(span.end), top + _ROW_HEIGHT
        tooltip = f"{action}: {(span.end - span.begin) * 1e3:.3f} ms, from {span.begin * 1e3:.3f} ms"
        fill = BLOCK_COLOURS[action.kind]
        canvas.rectangle(left, top, right, bottom, fill, kind=action.kind.value, tooltip=tooltip)
        if action in self._found.critical:
            canvas.line(left, bottom - 1, right, bottom - 1, _CRITICAL_COLOUR, "critical")
        if _text_width(_label(action), _NAME_SIZE) <= right - left:
            canvas.text((left + right) / 2, top + _ROW_HEIGHT / 2, _label(action), _NAME_SIZE, centred=True)

    def _draw_curve(
        self, canvas: _Canvas, memory: Sequence[tuple[float, int]], top: float, bottom: float
    ) -> None:
        ends = [time for time, _ in memory[1:]] + [self._found.seconds]
        for (begin, kept), end in zip(memory, ends, strict=True):
            height = (bottom - top - 2) * kept / max(self._peak, 1)
            if height and end > begin:
                left, right = self._x(begin), self._x(end)
                tooltip = f"keeps {_bytes(kept)} for backwards"
                canvas.rectangle(
                    left, bottom - height, right, bottom, _CURVE_COLOUR, kind="memory", tooltip=tooltip
                )

    def _draw_arrows(self, canvas: _Canvas) -> None:
        arrows = self._found.arrows
        for arrow in arrows if len(arrows) <= _MAX_ARROWS else []:
            down = arrow.receiver > arrow.sender
            begin = self._row_top(arrow.sender) + (_ROW_HEIGHT if down else 0)
            end = self._row_top(arrow.receiver) + (0 if down else _ROW_HEIGHT)
            canvas.line(self._x(arrow.begin), begin, self._x(arrow.end), end, _LINE_COLOUR, "arrow")

    def _draw_axis(self, canvas: _Canvas) -> None:
        """Draws the time axis, in milliseconds since the first action began."""
        y = self._bottom + _ROW_GAP
        canvas.line(self._left, y, self._right, y, _LINE_COLOUR)
        step = _round_up(_TICK_DISTANCE / self._scale * 1e3)
        decimals = max(0, -math.floor(math.log10(step)))
        for tick in range(math.floor(self._found.seconds * 1e3 / step) + 1):
            x = self._x(tick * step * 1e-3)
            canvas.line(x, y, x, y + 4, _LINE_COLOUR)
            number = f"{tick * step:.{decimals}f}" if tick else "0 ms"
            if x + _text_width(number, _TEXT_SIZE) / 2 <= self._right + _MARGIN:
                canvas.text(x, y + 4 + _LINE_HEIGHT / 2, number, _TEXT_SIZE, centred=True)


class _Canvas:
    """An SVG document. Coordinates are pixels from the top left corner."""

    def __init__(self, width: int, height: int) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="DejaVu Sans Mono, monospace" '
            f'fill="{_TEXT_COLOUR}">',
            '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="6" height="6" fill="#ffffff"/>'
            f'<rect width="2" height="6" fill="{_LINE_COLOUR}"/></pattern>',
        ]

    def document(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"

    def rectangle(
        self, left: float, top: float, right: float, bottom: float, fill: str, **notes: str
    ) -> None:
        place = f'x="{left:.2f}" y="{top:.2f}" width="{right - left:.2f}" height="{bottom - top:.2f}"'
        name = f' class="{notes["kind"]}"' if "kind" in notes else ""
        # A white outline separates a block from its neighbours.
        is_block = notes.get("kind") in {kind.value for kind in BLOCK_COLOURS}
        outline = ' stroke="#ffffff" stroke-width="0.5"' if is_block else ""
        title = f"<title>{escape(notes['tooltip'])}</title>" if "tooltip" in notes else ""
        self._parts.append(f'<rect{name} {place} fill="{fill}"{outline}>{title}</rect>')

    def hatch(self, left: float, top: float, right: float, bottom: float) -> None:
        self.rectangle(left, top, right, bottom, "url(#hatch)", kind="loss")

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, kind: str = "") -> None:
        name = f' class="{kind}"' if kind else ""
        width = 2 if kind == "critical" else 1
        place = f'x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"'
        self._parts.append(f'<line{name} {place} stroke="{colour}" stroke-width="{width}"/>')

    def text(self, x: float, y: float, text: str, size: int, *, centred: bool = False) -> None:
        anchor = "middle" if centred else "start"
        place = f'x="{x:.2f}" y="{y + 0.36 * size:.2f}" font-size="{size}" text-anchor="{anchor}"'
        printable = "".join(c for c in text if c.isprintable())  # XML has no other characters
        self._parts.append(f"<text {place}>{escape(printable)}</text>")

    def group(self, name: str) -> None:
        self._parts.append(f'<g class="stage" id="{escape(name.replace(" ", ""))}">' if name else "</g>")


def _label(action: Action) -> str:
    return f"{action.kind.value}{action.microbatch}"


def _bytes(count: int) -> str:
    return f"{count / 2**20:.2f} MiB" if count >= 2**20 / 100 else f"{count} bytes"


def _round_up(number: float) -> float:
    """Returns the least number of the form 1, 2 or 5 times a power of ten that is not below `number`."""
    power: float = 10.0 ** math.floor(math.log10(number))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= number * (1 - 1e-9))


def _text_width(text: str, size: float) -> float:
    return len(text) * size * _LETTER_WIDTH
