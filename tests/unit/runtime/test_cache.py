"""The least-recently-used cache."""

from __future__ import annotations

from gpipe_fast.runtime.cache import Cache


def test_the_least_recently_used_entry_is_evicted() -> None:
    cache: Cache[str, int] = Cache(2)
    cache["a"], cache["b"] = 1, 2
    assert cache.lookup("a") == 1
    cache["c"] = 3
    assert cache.entries() == [("a", 1), ("c", 3)]
    assert cache.lookup("b") is None
    assert len(cache) == 2


def test_a_replaced_entry_evicts_nothing() -> None:
    cache: Cache[str, int] = Cache(2)
    cache["a"], cache["b"] = 1, 2
    cache["a"] = 3
    assert dict(cache) == {"a": 3, "b": 2}


def test_entries_are_a_copy() -> None:
    cache: Cache[int, int] = Cache(3)
    cache[0] = 0
    for key, _ in cache.entries():
        cache[key + 1] = 0
    assert list(cache) == [0, 1]
