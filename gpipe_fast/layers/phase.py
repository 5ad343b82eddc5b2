"""Phase queries: layers that count, print or keep statistics ask whether they are being recomputed."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

from gpipe_fast.unsupported import uncompiled


class _Phase(threading.local):
    checkpointing = False
    recomputing = False


_phase = _Phase()

# The reason why layers that ask run in Python.
ASKS_PHASE = "it calls is_checkpointing() or is_recomputing()"
_asked_in_python = functools.partial(uncompiled, reason=ASKS_PHASE)


@_asked_in_python
def is_checkpointing() -> bool:
    """Returns whether this is a forward whose activations the backward will recompute.

    A layer that calls this runs in Python, so that the query is answered for every micro-batch.
    """
    return _phase.checkpointing


@_asked_in_python
def is_recomputing() -> bool:
    """Returns whether this is a recompute, the second run of a checkpointed forward.

    A layer that calls this runs in Python, so that the query is answered for every micro-batch.
    """
    return _phase.recomputing


@contextlib.contextmanager
def phase_scope(*, checkpointing: bool = False, recomputing: bool = False) -> Iterator[None]:
    """Sets the phase of the calling thread for a block."""
    before = vars(_phase).copy()
    _phase.checkpointing, _phase.recomputing = checkpointing, recomputing
    try:
        yield
    finally:
        vars(_phase).clear()
        vars(_phase).update(before)
