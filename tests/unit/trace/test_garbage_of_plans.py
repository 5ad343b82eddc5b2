"""Garbage of a block is collected when it ends; objects from before are not visited."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from gpipe_fast.trace import garbage
from gpipe_fast.trace.garbage import collected, collector_paused


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def no_automatic_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_cycles_made_inside_the_block_are_collected() -> None:
    before = weakref.ref(Cycle())
    with collected():
        inside = weakref.ref(Cycle())
        with collector_paused():
            pass
    assert inside() is None
    assert before() is not None
    assert gc.get_freeze_count() == 0


def test_a_block_without_graphs_leaves_its_garbage_to_python() -> None:
    with collected():
        inside = weakref.ref(Cycle())
    assert inside() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert inside() is None


def test_garbage_from_before_is_collected_once_it_is_a_fourth_of_all_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Collections of new objects alone would forever delay Python's collection of old ones."""
    with collected():
        pass
    old = weakref.ref(Cycle())
    with collected():
        pass
    assert old() is not None
    monkeypatch.setattr(garbage._LongLived, "num_blocks", garbage._LongLived.num_blocks // 2)
    with collected():
        pass
    assert old() is None
    assert gc.get_freeze_count() == 0
