"""Phase queries: layers that count, print or keep statistics ask whether they are being recomputed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class PhaseQueryWhileTracing(RuntimeError):
    """Raised when a traced layer queries its phase: a recompute may differ, which a trace cannot show."""


class _Phase(threading.local):
    checkpointing = False
    recomputing = False
    tracing = False


_phase = _Phase()


def is_checkpointing() -> bool:
    """Returns whether this is a forward whose activations the backward will recompute.

    A layer that calls this runs in Python, so that the query is answered for every micro-batch.
    """
    return _answer_query(_phase.checkpointing)


def is_recomputing() -> bool:
    """Returns whether this is a recompute, the second run of a checkpointed forward.

    A layer that calls this runs in Python, so that the query is answered for every micro-batch.
    """
    return _answer_query(_phase.recomputing)


def _answer_query(answer: bool) -> bool:
    if _phase.tracing:
        raise PhaseQueryWhileTracing("it calls is_checkpointing() or is_recomputing()")
    return answer


@contextlib.contextmanager
def phase_scope(
    *, checkpointing: bool = False, recomputing: bool = False, tracing: bool = False
) -> Iterator[None]:
    """Sets the phase of the calling thread for a block."""
    before = vars(_phase).copy()
    _phase.checkpointing, _phase.recomputing, _phase.tracing = checkpointing, recomputing, tracing
    try:
        yield
    finally:
        vars(_phase).clear()
        vars(_phase).update(before)
