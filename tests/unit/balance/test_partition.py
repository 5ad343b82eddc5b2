"""Optimal balances, compared with exhaustive search."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal

import pytest
import torch

from gpipe_fast.balance.partition import balance_by_cost, check_partitions

blockpartition = pytest.importorskip("torchgpipe.balance.blockpartition")
Objective = Literal["max", "variance"]
Draw = Callable[[random.Random], float]
Combine = Callable[[Fraction, Fraction], Fraction]
both_objectives = pytest.mark.parametrize("objective", ["max", "variance"])

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


@both_objectives
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_balance_by_cost_equals_exhaustive_search(seed: int, kind: str, objective: Objective) -> None:
    generator = random.Random(f"{seed} {kind}")
    costs = [KINDS[kind](generator) for _ in range(generator.randrange(1, 9))]
    for partitions in range(1, len(costs) + 1):
        assert balance_by_cost(partitions, costs, objective) == best_balance(costs, partitions, objective)


@both_objectives
@pytest.mark.parametrize("kind", KINDS)
def test_balance_by_cost_of_twelve_layers_equals_exhaustive_search(kind: str, objective: Objective) -> None:
    generator = random.Random(kind)
    costs = [KINDS[kind](generator) for _ in range(12)]
    for partitions in (2, 4, 6):
        assert balance_by_cost(partitions, costs, objective) == best_balance(costs, partitions, objective)


def least_total(
    costs: Sequence[float], partitions: int, bound: Fraction, start: Fraction, combine: Combine
) -> Fraction:
    """Returns the least combined cost of partitions of cost at most `bound` each, by dynamic programming."""
    before = [Fraction(0), *itertools.accumulate(map(Fraction, costs))]
    best: list[Fraction | None] = [start, *[None] * len(costs)]
    for _ in range(partitions):
        best = [
            min(
                (
                    combine(rest, end - before[j])
                    for j in range(n)
                    if (rest := best[j]) is not None and end - before[j] <= bound
                ),
                default=None,
            )
            for n, end in enumerate(before)
        ]
    assert best[-1] is not None
    return best[-1]


@both_objectives
@pytest.mark.parametrize("kind", ["small", "real", "huge ratios", "any sign"])
@pytest.mark.parametrize("partitions", [3, 8, 39])
def test_balance_by_cost_of_forty_layers_is_optimal(partitions: int, kind: str, objective: Objective) -> None:
    generator = random.Random(kind)
    costs = [KINDS[kind](generator) for _ in range(40)]
    bound = sum((abs(Fraction(cost)) for cost in costs), Fraction(0))
    parts = partition_costs(costs, balance_by_cost(partitions, costs, objective))
    if objective == "max":
        bound = least_total(costs, partitions, bound, -bound, max)
        assert max(parts) == bound
    squares = least_total(costs, partitions, bound, Fraction(0), lambda rest, part: rest + part * part)
    assert sum((part * part for part in parts), Fraction(0)) == squares


def test_the_objectives_max_and_variance_differ() -> None:
    costs = [4, 7, 3, 5, 5]
    assert balance_by_cost(3, costs, "max") == [1, 2, 2]  # 4, 10, 10
    assert balance_by_cost(3, costs, "variance") == [2, 2, 1]  # 11, 8, 5


def test_equal_layers_are_cut_equally() -> None:
    assert balance_by_cost(4, [1.0] * 12) == [3, 3, 3, 3]


def test_an_expensive_layer_gets_its_own_partition() -> None:
    assert balance_by_cost(3, [1, 1, 9, 1, 1]) == [2, 1, 2]


@both_objectives
def test_among_equal_balances_the_last_partitions_have_most_layers(objective: Objective) -> None:
    assert balance_by_cost(2, [1, 1, 1], objective) == [1, 2]
    assert balance_by_cost(3, [0] * 5, objective) == [1, 1, 3]


def test_among_balances_of_equal_maximum_the_least_variance_wins() -> None:
    assert balance_by_cost(3, [9, 1, 1, 1, 1, 1, 1]) == [1, 3, 3]


def test_sums_of_costs_are_exact() -> None:
    """In floating point 1e16 + 1 is 1e16, and all balances would be equal."""
    assert balance_by_cost(2, [1, 1e16, 1, 1]) == [2, 2]
    assert balance_by_cost(2, [1, 1, 1e16, 1]) == [2, 2]
    assert balance_by_cost(2, [0.1, 0.2, 0.3]) == [2, 1]  # the exact sum of 0.1 and 0.2 exceeds the float 0.3


def test_costs_may_be_any_iterable_of_numbers() -> None:
    assert balance_by_cost(2, iter([1, 2.0, Fraction(3), True])) == [2, 2]
    assert balance_by_cost(2, torch.tensor([1.0, 1.0, 5.0])) == [2, 1]


def test_numbers_of_partitions_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^partitions must be a positive integer \(0 < 1\)$"):
        balance_by_cost(0, [42])
    with pytest.raises(ValueError, match=r"^partitions must be a positive integer \(-1 < 1\)$"):
        check_partitions(-1, 1)
    with pytest.raises(TypeError, match=r"^partitions must be a positive integer, got 1\.5$"):
        balance_by_cost(1.5, [42])  # type: ignore[arg-type]


@pytest.mark.parametrize("costs", [[], [42]])
def test_more_partitions_than_layers_are_refused(costs: list[float]) -> None:
    with pytest.raises(
        ValueError, match=rf"^sequence is shorter than intended partitions \({len(costs)} < 2\); pass"
    ):
        balance_by_cost(2, costs)


@pytest.mark.parametrize(("partitions", "costs"), [(0, [42]), (2, [42])])
def test_error_messages_begin_as_torchgpipes(partitions: int, costs: list[int]) -> None:
    with pytest.raises(ValueError) as theirs:
        blockpartition.solve(costs, partitions)
    with pytest.raises(ValueError) as ours:
        balance_by_cost(partitions, costs)
    assert str(ours.value).startswith(str(theirs.value))


@pytest.mark.parametrize("seed", range(10))
def test_balance_by_cost_is_never_worse_than_torchgpipe(seed: int) -> None:
    generator = random.Random(seed)
    costs = [generator.randrange(1, 100) for _ in range(20)]
    for partitions in (2, 3, 5):
        theirs = [len(part) for part in blockpartition.solve(costs, partitions)]
        ours = balance_by_cost(partitions, costs)
        assert max(partition_costs(costs, ours)) <= max(partition_costs(costs, theirs))


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -float("inf"), "dear", None])
def test_costs_that_are_not_finite_numbers_are_refused(cost: float) -> None:
    with pytest.raises(ValueError, match=f"^the cost of layer 1 must be a finite number, got {cost!r}$"):
        balance_by_cost(1, [0, cost])


def test_unknown_objectives_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^objective is not one of 'max' or 'variance', got 'median'$"):
        balance_by_cost(1, [1], "median")  # type: ignore[arg-type]
