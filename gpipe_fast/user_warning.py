"""Warnings that point to the user's line, however many frames of this library and of PyTorch lie between."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_LIBRARIES = frozenset({"gpipe_fast", "torch"})


def warn_user(text: str) -> None:
    """Warns at the innermost line outside of this library and of PyTorch."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
