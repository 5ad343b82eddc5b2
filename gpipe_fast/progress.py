"""Says what a long first call is doing: a line that is rewritten on a terminal, one line elsewhere.

A thread waits until the work has taken two seconds, and then shows what the working thread has last noted::

    gpipe_fast: tracing stage 1 of 3, layers 4 to 7 (5 s)

The working thread notes steps, which costs nothing that can be measured, and writes nothing. So a trace,
which observes the Python code of its own thread, does not see the display.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

# 0 shows nothing.
VARIABLE = "GPIPE_FAST_PROGRESS"
# Seconds after which a user wants to know what takes so long, and seconds between two looks at the work.
DELAY_SECONDS = 2.0
REFRESH_SECONDS = 0.2

# The maximum number of shapes that a line lists.
_MAX_SHAPES = 4

_log = logging.getLogger("gpipe_fast")
_active = threading.local()

# Held while anything is drawn, and by a fork, so that a child does not inherit a lock of a stream from a
# thread that it lacks.
_drawing = threading.Lock()
os.register_at_fork(
    before=_drawing.acquire, after_in_parent=_drawing.release, after_in_child=_drawing.release
)


class Work:
    """A piece of work. Only the working thread writes.

    Attributes:
        doing: what is being done.
        purpose: what the work is for.
    """

    def __init__(self, doing: str, purpose: str = "") -> None:
        self.doing, self.purpose = doing, purpose
        self._begin = time.monotonic()
        self._name, self._where = doing, ""
        self._sizes: Sequence[int] = ()
        self._first_layer = 0

    def enter_stages(self, sizes: Sequence[int], first_layer: int) -> None:
        """Notes that steps concern stages with these numbers of layers, from a layer on."""
        self._sizes, self._first_layer = sizes, first_layer

    def enter_step(self, name: str, layers: tuple[int, int] | None) -> None:
        """Notes that a step begins, for layers (first and number); None for those of the latest step."""
        if layers is not None:
            self._where = self._place(*layers)
        self.doing = self._name = f"{name} {self._where}"

    def enter_part(self, doing: str) -> None:
        """Notes that a part of the work begins that may be done by itself, too, such as compiling kernels."""
        self.doing = self._name = f"{doing} for {self._where}" if self._where else doing

    def count(self, done: int, total: int) -> None:
        """Notes how many pieces of the present part are done."""
        self.doing = f"{self._name} ({done} of {total})"

    def seconds(self) -> float:
        """Returns how long the work has taken."""
        return time.monotonic() - self._begin

    def _place(self, first: int, number: int) -> str:
        layers = f"layer {first}" if number == 1 else f"layers {first} to {first + number - 1}"
        if len(self._sizes) < 2:
            return layers
        ends = [self._first_layer + end for end in accumulate(self._sizes)]
        return f"stage {bisect_right(ends, first)} of {len(ends)}, {layers}"


def _display(work: Work, ended: threading.Event, at_once: bool) -> None:
    """Shows a piece of work until it has ended; the thread's function.

    Args:
        work: the work.
        ended: set when it has ended.
        at_once: whether to show it at once, even if standard error is not a terminal.
    """
    if not at_once and ended.wait(DELAY_SECONDS):
        return
    with contextlib.suppress(Exception):  # standard error may be closed, or any object
        if at_once or _is_terminal():
            _rewrite_line(work, ended)
        else:
            _write_line(f"{work.doing}{work.purpose}")


def _write_line(text: str) -> None:
    with _drawing:
        if _log.hasHandlers():
            _log.info(text)
        elif sys.stderr is not None:
            print(f"gpipe_fast: {text}", file=sys.stderr, flush=True)


def _rewrite_line(work: Work, ended: threading.Event) -> None:
    width = shutil.get_terminal_size((100, 20)).columns - 1

    def write(text: str) -> None:
        with _drawing:
            print(f"\r{text[:width]:{width}}\r", end="", file=sys.stderr, flush=True)

    try:
        while True:
            write(f"gpipe_fast: {work.doing} ({work.seconds():.0f} s)")
            if ended.wait(REFRESH_SECONDS):
                break
    finally:
        write("")


def _started(*arguments: Any) -> threading.Thread | None:
    """Starts the thread of a display, if the system can start one."""
    thread = threading.Thread(target=_display, args=arguments, name="gpipe_fast progress", daemon=True)
    with contextlib.suppress(RuntimeError):
        thread.start()
        return thread
    return None


@contextlib.contextmanager
def working(doing: str, purpose: str = "", show: bool | None = None) -> Iterator[Work]:
    """Shows the work in the block while it lasts. Inside another such block, that one's display continues.

    Args:
        doing: what is being done at first.
        purpose: what the work is for, for the line that is written if there is no terminal.
        show: whether to show the line that is rewritten, at once; by default only after two seconds and on a
            terminal.
    """
    outer = getattr(_active, "work", None)
    if outer is not None:
        outer.enter_part(doing)
        yield outer
        return
    work = Work(doing, purpose)
    if show is None and not _is_wanted():
        show = False
    ended, thread = threading.Event(), None
    try:
        _active.work = work
        thread = None if show is False else _started(work, ended, bool(show))
        yield work
    finally:
        _active.work = None
        ended.set()
        if thread is not None:
            thread.join(1.0)  # a terminal that is stopped may hold the thread up


@contextlib.contextmanager
def first_call(
    sizes: Sequence[int],
    first_layer: int = 0,
    what: str = "the first call with these inputs and settings",
    outlook: str = "",
) -> Iterator[None]:
    """Shows the steps in the block, in which programs are made for a call.

    Args:
        sizes: the number of layers of each stage.
        first_layer: the first layer of the first stage.
        what: what is new.
        outlook: what to expect of later calls for which something is new.
    """
    with working("tracing") as work:
        work.purpose = work.purpose or f" for {what}; later calls reuse the result{outlook}"
        work.enter_stages(sizes, first_layer)
        yield


def title_of(tensors: Iterable[Any]) -> str:
    """Returns the shapes of tensors as text, without numbers; of many shapes, only the first."""
    found = dict.fromkeys(tuple(tensor.shape) for tensor in tensors)
    shapes = [str(shape) for shape in found if shape] or ["()"]
    return f"shape {', '.join(shapes[:_MAX_SHAPES])}{', ...' if len(shapes) > _MAX_SHAPES else ''}"


def step(name: str, first_layer: int | None = None, num_layers: int = 1) -> None:
    """Notes that a step begins: "tracing", "splitting" or "lowering".

    Args:
        name: the step.
        first_layer: the first layer that it concerns; None for the layers of the step before.
        num_layers: the number of these layers.
    """
    work = getattr(_active, "work", None)
    if work is not None:
        work.enter_step(name, None if first_layer is None else (first_layer, num_layers))


def _is_wanted() -> bool:
    """Returns whether to show anything: of the processes that `torchrun` starts, only the first does."""
    return os.environ.get(VARIABLE) != "0" and os.environ.get("LOCAL_RANK", "0") == "0"


def _is_terminal() -> bool:
    try:
        return bool(sys.stderr.isatty())
    except (AttributeError, ValueError):  # None, closed, or another object that can be written to
        return False
