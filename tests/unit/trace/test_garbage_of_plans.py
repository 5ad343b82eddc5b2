"""Garbage of a block is collected when it ends; objects from before are not visited."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.trace import garbage
from gpipe_fast.trace.garbage import collected


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
    assert inside() is None
    assert before() is not None
    assert gc.get_freeze_count() == 0


def test_objects_that_the_user_has_frozen_stay_frozen() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with collected():
            pass
        assert gc.get_freeze_count() > count / 2  # other code may free a few of them
    finally:
        gc.unfreeze()


def test_no_plan_visits_all_frozen_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting them took 30 ms, several times for each plan."""
    count, found = gc.get_freeze_count, list[int]()

    def counted() -> int:
        found.append(count())
        return found[-1]

    monkeypatch.setattr(gc, "get_freeze_count", counted)
    GPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1])(torch.randn(8, 4)).sum().backward()
    assert set(found) == {0}


def test_an_error_in_the_block_leaves_nothing_frozen() -> None:
    with pytest.raises(ValueError, match="inside"), collected():
        raise ValueError("inside")
    assert gc.get_freeze_count() == 0


def test_garbage_from_before_is_collected_once_it_is_a_fourth_of_all_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Collections of new objects alone would forever delay Python's collection of old ones."""

    class Cycle:
        def __init__(self) -> None:
            self.own = self

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
