"""Ctrl-C during a trace, without the crash that it may cause in PyTorch."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType

# Seconds between two looks at the interrupted code, and the maximum number of looks.
_PAUSE = 0.001
_MAX_PAUSES = 1000


@contextlib.contextmanager
def interrupts_between_contexts() -> Iterator[None]:
    """Calls the handler of SIGINT in the block only while no context manager is being entered or left.

    PyTorch's tracer enters and leaves its modes at every operator. If a ``KeyboardInterrupt`` keeps a mode's
    ``__exit__`` from leaving it, a destructor in C++ finds the mode in its place, throws, and so ends the
    process. A signal that arrives there is sent again, a millisecond later.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    call_handler, pauses = before, 0
    block = sys._getframe(2).f_code  # of the function that contains the block; 1 is contextlib

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal pauses
        if pauses < _MAX_PAUSES and _changes_contexts(frame, block):
            pauses += 1
            threading.Timer(_PAUSE, signal.raise_signal, (number,)).start()
            return
        pauses = 0
        call_handler(number, frame)

    try:
        signal.signal(signal.SIGINT, handle)
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _changes_contexts(frame: FrameType | None, block: CodeType) -> bool:
    """Returns whether a frame, or a caller of it within the block, enters or leaves a context manager."""
    while frame is not None and frame.f_code is not block:
        if frame.f_code.co_name in ("__enter__", "__exit__"):
            return True
        frame = frame.f_back
    return False
