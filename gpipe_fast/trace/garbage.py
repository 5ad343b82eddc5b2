"""Pauses Python's cyclic garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


class OlderObjects:
    """The objects that existed before the plan that is being made.

    Attributes:
        are_frozen: whether collections leave them out. `gc.get_freeze_count` would visit each of them.
    """

    are_frozen = False


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the collector in a block, and collects the objects that became garbage in it.

    A trace creates so many objects that the collector would examine all objects of the process several times,
    for about a fourth of the trace's time. It would also call finalizers and callbacks of unrelated code,
    in the middle of a trace.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        # If older objects are frozen, a full collection is cheap, and leaves less memory in fragments.
        gc.collect(2 if OlderObjects.are_frozen else 0)
