"""Timelines of recorded steps: `draw` renders a `Recording` as SVG."""

from gpipe_fast.reports.recording import draw

__all__ = ["draw"]
