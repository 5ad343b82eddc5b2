"""Partitioning of a sequence of costs into consecutive partitions, in exact integer arithmetic."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from numbers import Rational
from typing import Literal

OBJECTIVES = ("max", "variance")


def balance_by_cost(
    partitions: int, costs: Iterable[float], objective: Literal["max", "variance"] = "max"
) -> list[int]:
    """Balances layers by their costs.

    The result is exactly optimal: costs are added and compared as fractions, without rounding. Ties under
    ``'max'`` are broken by the least variance; remaining ties by the most layers in the last partition, then
    in the second to last, and so on.

    Time is O(K L^2) for L layers in K partitions.

    Args:
        partitions: the number of partitions, K.
        costs: the cost of each layer, finite, in any unit.
        objective: ``'max'`` minimises the largest cost of a partition, which bounds the throughput of a
            pipeline; ``'variance'`` minimises the variance of the partitions' costs, as the GPipe paper does
            (arXiv 1811.06965, section 2).

    Returns:
        The number of layers of each partition, at least 1.

    Raises:
        TypeError: ``costs`` is not iterable, or ``partitions`` is not an integer.
        ValueError: there are fewer layers than partitions, a cost is not finite, or ``objective`` is unknown.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective is not one of 'max' or 'variance', got {objective!r}")
    if isinstance(costs, str) or not isinstance(costs, Iterable):
        raise TypeError(f"costs must be a list with a number for each layer, got {costs!r}")
    numbers = _as_integers(costs)
    check_partitions(partitions, len(numbers))
    prefix = [0, *accumulate(numbers)]
    span = max(prefix) - min(prefix)  # an upper bound on the cost of a partition
    bound = span if objective == "variance" else _least(prefix, partitions, max, -span)[0]
    never = partitions * span * span + 1  # more than any sum of squares within the bound

    # The number and the sum of the costs are fixed, so the least sum of squares has the least variance.
    def squares(before: int, cost: int) -> int:
        return before + cost * cost if cost <= bound else never

    starts = _least(prefix, partitions, squares, 0)[1]
    return [end - start for start, end in pairwise([*starts, len(numbers)])]


def check_partitions(partitions: int, num_layers: int) -> None:
    """Checks the number of partitions.

    Raises:
        TypeError: ``partitions`` is not an integer.
        ValueError: ``partitions`` is not positive, or exceeds the number of layers.
    """
    try:
        number = operator.index(partitions)
    except TypeError:
        raise TypeError(f"partitions must be a positive integer, got {partitions!r}") from None
    if number < 1:
        raise ValueError(f"partitions must be a positive integer ({partitions} < 1)")
    if num_layers < partitions:
        raise ValueError(
            f"sequence is shorter than intended partitions ({num_layers} < {partitions}); pass at most one "
            "partition for each layer, or split layers into smaller ones"
        )


def _as_integers(costs: Iterable[float]) -> list[int]:
    """Returns the costs scaled by the least common denominator."""
    fractions: list[Fraction] = []
    for layer, cost in enumerate(costs):
        try:
            fractions.append(Fraction(cost if isinstance(cost, Rational) else float(cost)))
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"the cost of layer {layer} must be a finite number, got {cost!r}") from None
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    return [fraction.numerator * (scale // fraction.denominator) for fraction in fractions]


def _least(
    prefix: Sequence[int], partitions: int, join: Callable[[int, int], int], none: int
) -> tuple[int, list[int]]:
    """Returns the least value of a partitioning, and the first layer of each partition.

    Let ``best_k[n]`` be the least value of the first n layers in k partitions, of which the last starts at
    layer j; of equal ones, the first j counts::

        best_k[n] = min over j of join(best_{k-1}[j], prefix[n] - prefix[j])

    Args:
        prefix: prefix sums of the costs: the cost of all layers before each layer, and then the total.
        partitions: the number of partitions.
        join: returns the value of some partitions and one more, from the value of these and its cost. It does
            not fall if the value grows.
        none: the value of no partitions.
    """
    num_layers = len(prefix) - 1
    best = [join(none, end) for end in prefix]
    table = []
    for k in range(2, partitions + 1):
        before, best, start = best, [0] * k, [0] * k
        for n in range(k, num_layers + 1):
            end = prefix[n]
            values = [join(before[j], end - prefix[j]) for j in range(k - 1, n)]
            best.append(min(values))
            start.append(k - 1 + values.index(best[n]))
        table.append(start)
    starts, end = [], num_layers
    for start in reversed(table):
        end = start[end]
        starts.append(end)
    return best[num_layers], [0, *reversed(starts)]
