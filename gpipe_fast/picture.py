"""Pictures of recorded steps: `draw` renders a `Recording` as SVG."""

from __future__ import annotations

import os
from pathlib import Path

from gpipe_fast.reports.chart import svg
from gpipe_fast.reports.recording import Recording

__all__ = ["draw"]


def draw(recording: Recording, path: str | os.PathLike[str] | None = None, *, title: str = "") -> str:
    """Draws the latest step of a recording, or its latest forward if no backward followed.

    Time runs to the right, to scale. Between the blocks is idle time (the bubble), coloured by its cause; the
    hatched area between forward and backward is the caller's loss. A block has a label if it fits, a tooltip
    with its times, and a line below it if it is on the critical path. Thin lines lead from each SEND to its
    RECV, and below each row is what the stage keeps for backwards. `Report.save` writes the same picture, and
    others.

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
        raise ValueError(
            f"drawings are SVG files: the path must end in .svg, got {str(path)!r}; for other files, use "
            "recording.report().save(path)"
        )
    if not recording.latest:
        raise ValueError("the recording holds no step: call the model inside its block, and draw after it")
    report = recording.report()
    drawing = svg(report.timeline(), [*([title] if title else []), report.headline()])
    if path is not None:
        Path(path).write_text(drawing, encoding="utf-8")
    return drawing
