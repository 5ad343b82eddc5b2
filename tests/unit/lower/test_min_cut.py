"""Nested minimum cuts: compared with all subsets of operators on small random graphs."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import chain, combinations, pairwise

import pytest

from gpipe_fast.lower.min_cut import Choices, Operator, Recomputed, SaveableValue


def drawn(seed: int) -> Choices:
    """Returns a random graph; some operators have several results, and many are equal."""
    draw = random.Random(seed)
    operators: list[Operator] = []
    values: list[SaveableValue] = []
    for index in range(draw.randint(1, 9)):
        reads = draw.sample(range(len(values)), min(len(values), draw.randint(0, 3)))
        operators.append(Operator(draw.choice([1, 2, 2, 5, 9]), frozenset(reads)))
        for _ in range(draw.choice([1, 1, 1, 2])):
            values.append(SaveableValue(draw.choice([0, 1, 3, 3, 8]), index, draw.random() < 0.4))
    return Choices(operators, values)


def subsets(choices: Choices) -> list[Recomputed]:
    numbers = range(len(choices.operators))
    return [frozenset(s) for size in range(len(numbers) + 1) for s in combinations(numbers, size)]


@pytest.mark.parametrize("seed", range(40))
def test_no_subset_is_better_at_any_price(seed: int) -> None:
    choices = drawn(seed)
    found = list(choices.nested())
    assert found[-1] == frozenset()
    assert choices.cost(found[0])[0] == 0
    costs = [choices.cost(each) for each in found]
    for (more, less), (before, after) in zip(pairwise(found), pairwise(costs), strict=True):
        assert less < more
        assert before[0] <= after[0]
        assert before[1] > after[1]
    every = [choices.cost(each) for each in subsets(choices)]
    changes = [Fraction(b[0] - a[0], a[1] - b[1]) for a, b in pairwise(costs)]
    for price in chain(changes, [Fraction(n, d) for n in (0, 1, 2, 5, 20) for d in (1, 3, 7)]):
        best = min(size + price * time for size, time in every)
        assert min(size + price * time for size, time in costs) == best
    for price, pair in zip(changes, pairwise(costs), strict=True):  # both ends are optimal where it changes
        best = min(size + price * time for size, time in every)
        assert [size + price * time for size, time in pair] == [best, best]
