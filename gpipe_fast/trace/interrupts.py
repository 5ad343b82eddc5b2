"""Ctrl-C during a trace, without the crash that it may cause in PyTorch."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

# The number of seconds after which a further signal is handled at once.
_MAX_SECONDS = 10.0


class _Deferring:
    """A handler of SIGINT that calls another handler later."""

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self._handler = handler
        self._arrival: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._arrival is not None and now > self._arrival + _MAX_SECONDS:
            self._handler(number, frame)
        self._arrival = self._arrival or now

    def handle(self) -> None:
        """Calls the other handler if a signal has arrived."""
        if self._arrival is not None:
            self._arrival = None
            self._handler(signal.SIGINT, None)


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Calls the handler of SIGINT at the end of the block, or where the block calls `handle_interrupt`.

    While PyTorch traces, its C++ calls Python for each operator, and for each property of a fake tensor. A
    ``KeyboardInterrupt`` that is raised there may pass a function that is ``noexcept``, such as
    ``Node::add_input_metadata`` of ``torch/csrc/autograd/node.h``, or keep a mode's ``__exit__`` from leaving
    it, whose place a destructor checks. Both end the process.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    deferring = _Deferring(before)
    try:
        signal.signal(signal.SIGINT, deferring)
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        deferring.handle()


def handle_interrupt() -> None:
    """Calls the handler of a SIGINT that `interrupts_deferred` has deferred. No C++ may be on the stack."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Deferring):
        handler.handle()
