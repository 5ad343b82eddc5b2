"""Python's cyclic garbage collector, paused in traces."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the collector in a block, and collects the objects that became garbage in it.

    In the middle of a trace, it would call finalizers and callbacks of unrelated code, which would be taken
    for the layer's. It would also examine all objects of the process several times.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect(0)
