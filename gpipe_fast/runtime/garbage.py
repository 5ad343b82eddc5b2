"""The garbage of making plans, returned at once: graphs are cyclic, and a trace fragments the heap."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from gpipe_fast._extension import trim_heaps


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """Collects the cyclic garbage that a block leaves, and returns free memory to the system.

    A full collection takes half a second, because PyTorch alone has a million objects, so objects that
    existed before the block are not visited. If the user has frozen objects (`gc.freeze`), the garbage is
    left to Python's own collections: `gc.unfreeze` would unfreeze the user's objects as well.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
        trim_heaps()
