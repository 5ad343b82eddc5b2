"""Samples of tests: the same in every process of a commit, and others for another seed."""

from __future__ import annotations

import pytest

from tests import sampling

ITEMS = list(range(100))


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch):
    def use(value: str) -> None:
        monkeypatch.setenv("GPIPE_FAST_SEED", value)
        sampling.seed.cache_clear()

    yield use
    sampling.seed.cache_clear()


def test_a_seed_gives_one_sample_in_order(seeded) -> None:
    seeded("a")
    drawn = sampling.sample(ITEMS, 10, salt="test")
    assert drawn == sampling.sample(ITEMS, 10, salt="test") == sorted(set(drawn))
    assert len(drawn) == 10


def test_another_seed_or_name_gives_another(seeded) -> None:
    seeded("a")
    drawn, other = (sampling.sample(ITEMS, 10, salt=salt) for salt in ("test", "other"))
    seeded("b")
    assert drawn not in (other, sampling.sample(ITEMS, 10, salt="test"))


def test_every_item_comes_up(seeded) -> None:
    found = set[int]()
    for number in range(100):
        seeded(str(number))
        found.update(sampling.sample(ITEMS, 10, salt="test"))
    assert found == set(ITEMS)


def test_few_items_are_all_drawn(seeded) -> None:
    seeded("a")
    assert sampling.sample([3, 1, 2], 10, salt="test") == [3, 1, 2]
