"""The garbage of making plans, returned at once: graphs are cyclic, and a trace fragments the heap."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from gpipe_fast._extension import trim_heaps


class _LongLived:
    """The number of objects in the process after its latest full collection; 0 before the first plan."""

    number = 0


# Python, too, waits with a full collection until a fourth has been added since the last one.
_GROWTH = 1.25


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """Collects the cyclic garbage that a block leaves, and returns free memory to the system.

    A full collection takes half a second, because PyTorch alone has a million objects. So objects that
    existed before the block are visited only if their number has grown by a fourth: each collection here
    delays those of Python, which would visit them. If the user has frozen objects (`gc.freeze`), the garbage
    is left to Python's own collections: `gc.unfreeze` would unfreeze the user's objects as well.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    older = gc.get_freeze_count()
    try:
        yield
    finally:
        _LongLived.number = _LongLived.number or older
        is_full = older > _GROWTH * _LongLived.number
        if is_full:
            gc.unfreeze()
        gc.collect()
        if is_full:
            gc.freeze()
            _LongLived.number = gc.get_freeze_count()
        gc.unfreeze()
        trim_heaps()
