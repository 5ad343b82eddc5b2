"""Random samples of tests: equal in every process, and different for another seed."""

from __future__ import annotations

import functools

import pytest

from tests import sampling

pytest_plugins = ["pytester"]
ITEMS = list(range(100))


@pytest.fixture
def use_seed(monkeypatch: pytest.MonkeyPatch):
    return functools.partial(monkeypatch.setenv, "GPIPE_FAST_SEED")


def test_a_seed_determines_a_sorted_sample(use_seed) -> None:
    use_seed("a")
    drawn = sampling.sample(ITEMS, 10, salt="test")
    assert drawn == sampling.sample(ITEMS, 10, salt="test") == sorted(set(drawn))
    assert len(drawn) == 10


def test_another_seed_or_salt_gives_another_sample(use_seed) -> None:
    use_seed("a")
    drawn, other = (sampling.sample(ITEMS, 10, salt=salt) for salt in ("test", "other"))
    use_seed("b")
    assert drawn not in (other, sampling.sample(ITEMS, 10, salt="test"))


def test_every_item_is_drawn_for_some_seed(use_seed) -> None:
    found = set[int]()
    for number in range(100):
        use_seed(str(number))
        found.update(sampling.sample(ITEMS, 10, salt="test"))
    assert found == set(ITEMS)


def test_few_items_are_all_drawn(use_seed) -> None:
    use_seed("a")
    assert sampling.sample([3, 1, 2], 10, salt="test") == [3, 1, 2]


@pytest.mark.xdist_group("sampling")
def test_a_worker_knows_the_group_of_a_test(request: pytest.FixtureRequest) -> None:
    """Tests of a group run in one worker only if their ids end with the name of the group."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@sampling")


SUITE = """
import pytest

def test_quick():
    pass

@pytest.mark.extended
@pytest.mark.parametrize("number", range(10))
def test_longer(number):
    pass

@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [*(pytest.param(i, marks=pytest.mark.soak) for i in range(4)), 4])
def test_one_of_a_sample_that_is_no_long_run(number):
    pass

@pytest.mark.soak
def test_long():
    pass
"""


@pytest.mark.parametrize(
    ("options", "num_run"),
    [(["--tier=rest"], 10), (["--tier=all"], 12), (["--tier=soak"], 17), ([], 2), (["--tier=check"], 1)],
)
def test_a_tier_runs(
    options: list[str], num_run: int, pytester: pytest.Pytester, use_seed, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest("from tests.conftest import *")
    suite = pytester.makepyfile(SUITE)
    longer = pytester.makefile(".txt", f"{suite.name}::test_quick")
    monkeypatch.setattr("tests.conftest.LONGER", longer)
    use_seed("a")
    pytester.runpytest_inprocess("-p", "no:xdist", *options).assert_outcomes(
        passed=num_run, deselected=17 - num_run
    )
