"""Python's cyclic garbage collector: paused in traces, and called for the garbage of making plans.

Graphs are cyclic, and a trace fragments the heap.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

from gpipe_fast._extension import trim_heaps


class OlderObjects:
    """The objects that existed before the plan that is being made.

    Attributes:
        are_frozen: whether collections leave them out. `gc.get_freeze_count` would visit each of them.
        graphs_made: whether graphs, which leave garbage, have been made since.
    """

    are_frozen = False
    graphs_made = False


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the collector in a block, and collects the objects that became garbage in it.

    In the middle of a trace, it would call finalizers and callbacks of unrelated code, which would be taken
    for the layer's. It would also examine all objects of the process several times.
    """
    OlderObjects.graphs_made = True
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


class _LongLived:
    """The number of memory blocks of Python after the latest full collection; 0 before the first plan."""

    num_blocks = 0


# Python, too, waits with a full collection until a fourth has been added since the last one.
_GROWTH = 1.25


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """Collects the cyclic garbage that a block leaves, and returns free memory to the system.

    That is, if graphs are made in it, with the collector paused. A plan from templates makes none.

    A full collection takes half a second, because PyTorch alone has a million objects. So objects that
    existed before the block are visited only if there are a fourth more memory blocks than after the latest
    full collection: each collection here delays those of Python, which would visit them. If the user has
    frozen objects (`gc.freeze`), the garbage is left to Python's own collections: `gc.unfreeze` would
    unfreeze the user's objects as well.
    """
    if OlderObjects.are_frozen or gc.get_freeze_count():
        yield
        return
    num_blocks = sys.getallocatedblocks()
    _LongLived.num_blocks = _LongLived.num_blocks or num_blocks
    gc.freeze()
    OlderObjects.are_frozen, OlderObjects.graphs_made = True, False
    try:
        yield
    finally:
        OlderObjects.are_frozen = False
        if OlderObjects.graphs_made and num_blocks <= _GROWTH * _LongLived.num_blocks:
            gc.collect()
        gc.unfreeze()
        if num_blocks > _GROWTH * _LongLived.num_blocks:
            gc.collect()
            _LongLived.num_blocks = sys.getallocatedblocks()
        if OlderObjects.graphs_made:
            trim_heaps()
