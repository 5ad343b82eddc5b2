"""Partitioning of a sequence of costs into consecutive partitions, in exact integer arithmetic."""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Iterable, Sequence
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

    Time is O(K L log L) for L layers in K partitions, or O(K L^2) if a cost is negative.

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
    non_decreasing = min(numbers) >= 0
    if objective == "variance":
        bound = span
    elif non_decreasing:
        bound = _min_max_cost(prefix, partitions)
    else:
        bound = _min_max_cost_any_sign(prefix, partitions)
    starts = _PartitionSolver(prefix, partitions, bound, span, non_decreasing).solve()
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


def _min_max_cost(prefix: Sequence[int], partitions: int) -> int:
    """Returns the minimal cost of the most expensive partition, if no cost is negative."""

    def fits(bound: int) -> bool:
        # Greedy: each partition takes as many layers as fit. Using fewer partitions is fine, because dividing
        # one of them further never raises the maximum.
        end = 0
        for _ in range(partitions):
            end = bisect_right(prefix, prefix[end] + bound) - 1
        return end == len(prefix) - 1

    low = max(max(b - a for a, b in pairwise(prefix)), -(-prefix[-1] // partitions))
    high = prefix[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _min_max_cost_any_sign(prefix: Sequence[int], partitions: int) -> int:
    """Returns the minimal cost of the most expensive partition, for costs of any sign."""
    num_layers = len(prefix) - 1
    # best[n]: the minimum for the first n layers in k partitions. Entries that this round has not reached yet
    # are still for k - 1 partitions, so n runs downwards.
    best = list(prefix)
    for k in range(2, partitions + 1):
        for n in range(num_layers, k - 1, -1):
            end = prefix[n]
            best[n] = min(max(best[j], end - prefix[j]) for j in range(k - 1, n))
    return best[num_layers]


class _PartitionSolver:
    """A solver for the starts of partitions: minimises the sum of squared costs, each cost within a bound.

    The number and the total cost of the partitions are fixed, so the least sum of squares has the least
    variance. Let ``best_k[n]`` be the minimum for the first n layers in k partitions, of which the last
    starts at layer j::

        best_k[n] = min over j of best_{k-1}[j] + f(prefix[n] - prefix[j])

    f is the square, plus a penalty for costs beyond the bound. The penalty exceeds the sum of squares of any
    partitioning within the bound. f is convex, so if ``prefix`` is non-decreasing, the optimal j is
    non-decreasing in n: solving the middle n of a row first halves the search for the others (divide and
    conquer).

    Args:
        prefix: prefix sums of the costs: the cost of all layers before each layer, and then the total.
        partitions: the number of partitions.
        bound: the largest cost of a partition; a partitioning within the bound must exist.
        span: an upper bound on the cost of any partition.
        non_decreasing: whether ``prefix`` is non-decreasing.
    """

    def __init__(
        self, prefix: Sequence[int], partitions: int, bound: int, span: int, non_decreasing: bool
    ) -> None:
        self._prefix, self._partitions = prefix, partitions
        self._bound, self._non_decreasing = bound, non_decreasing
        self._penalty = partitions * span * span + 1
        self._best: list[int] = []
        self._next: list[int] = []
        self._start: list[int] = []

    def solve(self) -> list[int]:
        """Returns the first layer of each partition."""
        prefix, partitions = self._prefix, self._partitions
        num_layers = len(prefix) - 1
        self._next = [self._squares([0], n, [0])[0] for n in range(num_layers + 1)]
        table: list[list[int]] = []
        for k in range(2, partitions + 1):
            self._best, self._next, self._start = self._next, [0] * (num_layers + 1), [0] * (num_layers + 1)
            last = num_layers - partitions + k  # each later partition takes at least one layer
            self._fill(max(k, 1), last, k - 1, last - 1)
            table.append(self._start)
        starts, end = [], num_layers
        for start in reversed(table):
            end = start[end]
            starts.append(end)
        return [0, *reversed(starts)]

    def _fill(self, first: int, last: int, low: int, high: int) -> None:
        """Solves the row for n from ``first`` to ``last``, whose optimal j lie from ``low`` to ``high``."""
        if first > last:
            return
        n = (first + last) // 2
        begin, end = low, min(high, n - 1)
        squares = self._squares(self._prefix[begin : end + 1], n, self._best[begin : end + 1])
        self._next[n] = min(squares)
        self._start[n] = best = begin + squares.index(self._next[n])
        self._fill(first, n - 1, low, best if self._non_decreasing else high)
        self._fill(n + 1, last, best if self._non_decreasing else low, high)

    def _squares(self, prefix: Sequence[int], n: int, best: Sequence[int]) -> list[int]:
        end, bound, penalty = self._prefix[n], self._bound, self._penalty
        return [
            b + (c := end - x) * c if end - x <= bound else b + (end - x) ** 2 + penalty * (end - x - bound)
            for x, b in zip(prefix, best, strict=True)
        ]
