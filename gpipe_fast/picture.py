"""Timelines of recorded steps: `draw` renders a `Recording` as SVG."""

from gpipe_fast.inspect.picture import draw

__all__ = ["draw"]
