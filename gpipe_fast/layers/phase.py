"""What the stage that calls a layer is doing: asked by layers that count, print or keep statistics."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class AskedWhileTracing(RuntimeError):
    """A layer asked, and so may do something else in a recompute, which a trace would not show."""


class _Phase(threading.local):
    checkpointing = False
    recomputing = False
    tracing = False


_phase = _Phase()


def is_checkpointing() -> bool:
    """Whether this is the forward of a micro-batch whose activations are recomputed in the backward.

    A layer that asks runs in Python, so that it is asked for every micro-batch.
    """
    return _asked(_phase.checkpointing)


def is_recomputing() -> bool:
    """Whether this is such a recompute: the second run of the same forward."""
    return _asked(_phase.recomputing)


def _asked(answer: bool) -> bool:
    if _phase.tracing:
        raise AskedWhileTracing("it asks whether it is checkpointing or recomputing")
    return answer


@contextlib.contextmanager
def entered(
    *, checkpointing: bool = False, recomputing: bool = False, tracing: bool = False
) -> Iterator[None]:
    """Lets this thread be in a phase for a block."""
    before = vars(_phase).copy()
    _phase.checkpointing, _phase.recomputing, _phase.tracing = checkpointing, recomputing, tracing
    try:
        yield
    finally:
        vars(_phase).clear()
        vars(_phase).update(before)
