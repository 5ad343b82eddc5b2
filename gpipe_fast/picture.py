"""Pictures of recorded steps: `draw` makes an SVG of a `Recording`."""

from gpipe_fast.inspect.picture import draw

__all__ = ["draw"]
