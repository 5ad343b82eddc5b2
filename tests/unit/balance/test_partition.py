"""Optimal balances, compared with exhaustive search."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal

import pytest
import torch

from gpipe_fast.balance.partition import balance_by_cost

blockpartition = pytest.importorskip("torchgpipe.balance.blockpartition")
Objective = Literal["max", "variance"]
Draw = Callable[[random.Random], float]

# Distributions of costs. Few distinct values make many balances equally good.
KINDS: dict[str, Draw] = {
    "small": lambda g: g.choice([0, 0, 1, 2, 3, 10, 100]),
    "equal": lambda g: 7,
    "zero": lambda g: 0.0,
    "real": lambda g: g.lognormvariate(0, 1),
    "tenths": lambda g: g.randrange(10) / 10,
    "huge ratios": lambda g: 10.0 ** g.uniform(-300, 300),
    "beyond float": lambda g: g.randrange(4) * 10**400 + g.randrange(2),
    "any sign": lambda g: g.choice([-5, -1, 0, 1, 2, 10]),
    "negative": lambda g: -g.lognormvariate(0, 1),
    "any real": lambda g: g.gauss(0, 1),
}


def all_balances(num_layers: int, partitions: int) -> list[list[int]]:
    inner = itertools.combinations(range(1, num_layers), partitions - 1)
    return [[b - a for a, b in itertools.pairwise((0, *cuts, num_layers))] for cuts in inner]


def partition_costs(costs: Sequence[float], sizes: Sequence[int]) -> list[Fraction]:
    ends = list(itertools.accumulate(sizes, initial=0))
    return [sum(map(Fraction, costs[a:b]), Fraction(0)) for a, b in itertools.pairwise(ends)]


def best_balance(costs: Sequence[float], partitions: int, objective: Objective) -> list[int]:
    """Returns the best balance by exhaustive search. Ties go to that with most layers at the end."""

    def sort_key(sizes: list[int]) -> tuple[Fraction, Fraction, list[int]]:
        parts = partition_costs(costs, sizes)
        squares = sum((part * part for part in parts), Fraction(0))
        max_cost = max(parts) if objective == "max" else Fraction(0)
        return max_cost, squares, [-size for size in reversed(sizes)]

    return min(all_balances(len(costs), partitions), key=sort_key)


@pytest.mark.parametrize("objective", ["max", "variance"])
@pytest.mark.parametrize("kind", KINDS)
def test_balance_by_cost_equals_exhaustive_search(kind: str, objective: Objective) -> None:
    generator = random.Random(kind)
    for num_layers in (1, 2, 3, 4, 5, 6, 7, 8, 12):
        costs = [KINDS[kind](generator) for _ in range(num_layers)]
        for partitions in (1, 2, 4, 6) if num_layers == 12 else range(1, num_layers + 1):
            assert balance_by_cost(partitions, costs, objective) == best_balance(costs, partitions, objective)


def test_the_objectives_max_and_variance_differ() -> None:
    costs = [4, 7, 3, 5, 5]
    assert balance_by_cost(3, costs, "max") == [1, 2, 2]  # 4, 10, 10
    assert balance_by_cost(3, costs, "variance") == [2, 2, 1]  # 11, 8, 5


def test_sums_of_costs_are_exact() -> None:
    """In floating point 1e16 + 1 is 1e16, and all balances would be equal."""
    assert balance_by_cost(2, [1, 1e16, 1, 1]) == [2, 2]
    assert balance_by_cost(2, [1, 1, 1e16, 1]) == [2, 2]
    assert balance_by_cost(2, [0.1, 0.2, 0.3]) == [2, 1]  # the exact sum of 0.1 and 0.2 exceeds the float 0.3


def test_costs_may_be_any_iterable_of_numbers() -> None:
    assert balance_by_cost(2, iter([1, 2.0, Fraction(3), True])) == [2, 2]
    assert balance_by_cost(2, torch.tensor([1.0, 1.0, 5.0])) == [2, 1]


@pytest.mark.parametrize(("partitions", "costs"), [(0, [42]), (2, [42])])
def test_error_messages_begin_as_torchgpipes(partitions: int, costs: list[int]) -> None:
    with pytest.raises(ValueError) as theirs:
        blockpartition.solve(costs, partitions)
    with pytest.raises(ValueError) as ours:
        balance_by_cost(partitions, costs)
    assert str(ours.value).startswith(str(theirs.value))
