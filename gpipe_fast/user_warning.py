"""Warnings that point to the user's line, however many frames of this library and of PyTorch lie between."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FrameType

_LIBRARIES = frozenset({"gpipe_fast", "torch"})


_of_thread = threading.local()


@contextlib.contextmanager
def no_warnings_of_idle_stages() -> Iterator[None]:
    """In the block, the calling thread tries numbers of micro-batches that the user did not choose."""
    before = getattr(_of_thread, "tries", False)
    _of_thread.tries = True
    try:
        yield
    finally:
        _of_thread.tries = before


def warns_of_idle_stages() -> bool:
    """Returns whether the calling thread uses the number of micro-batches that the user chose."""
    return not getattr(_of_thread, "tries", False)


def warn_user(text: str) -> None:
    """Warns at the innermost line outside of this library and of PyTorch."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
