"""A store whose calls end: with a result, with an error, or after the timeout."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from gpipe_fast.distributed.timed_store import TimedStore

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch has no torch.distributed")


def test_methods_and_errors_are_those_of_the_store() -> None:
    store = TimedStore(dist.HashStore(), 10.0)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.store.get("key") == b"value"
    with pytest.raises(KeyError, match="text"):  # in the calling thread
        store.call({}.__getitem__, "text")
    assert store.call(lambda a, b: a + b, 1, 2) == 3


def test_a_lost_store_is_named() -> None:
    def lost() -> None:
        raise dist.DistNetworkError("reset by peer")

    with pytest.raises(RuntimeError, match=r"torch\.distributed is lost: .*: reset by peer"):
        TimedStore(dist.HashStore(), 10.0).call(lost)


def test_a_call_that_hangs_ends_and_so_do_later_ones() -> None:
    store, release = TimedStore(dist.HashStore(), 0.05), threading.Event()
    try:
        with pytest.raises(RuntimeError, match=r"has not answered for 0\.05 s"):
            store.call(release.wait)
        with pytest.raises(RuntimeError, match="has not answered"):
            store.call(int)  # at once: the thread is still busy
    finally:
        release.set()


def test_its_thread_ends_with_the_store() -> None:
    before = set(threading.enumerate())
    store: Any = TimedStore(dist.HashStore(), 10.0)
    (thread,) = set(threading.enumerate()) - before
    store.call(int)
    del store
    thread.join(timeout=10)
    assert not thread.is_alive()
