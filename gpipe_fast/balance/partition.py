"""Which layers go together: a sequence of costs cut into consecutive partitions. Plain numbers."""

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
    """Cuts layers into partitions by what each layer costs.

    The answer is exact: costs are added and compared as the fractions that they are, not rounded. Where cuts
    are equally good under ``'max'``, the one of least variance is taken; where they still are, the one with
    the most layers in the last partition, then in the one before it, and so on.

    It takes O(K L log L) steps for L layers in K partitions; O(K L^2) if a cost is negative.

    Args:
        partitions: how many, K.
        costs: of each layer, finite, in any unit.
        objective: ``'max'`` makes the dearest partition as cheap as possible, which is what a pipeline waits
            for; ``'variance'`` makes the variance of the partitions' costs as small as possible, as the GPipe
            paper does (arXiv 1811.06965, section 2).

    Returns:
        Layers per partition, each at least 1.

    Raises:
        TypeError: the costs are no list, or the number of partitions is no integer.
        ValueError: there are fewer layers than partitions, a cost is not finite, or the objective is none of
            these.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective is not one of 'max' or 'variance', got {objective!r}")
    if isinstance(costs, str) or not isinstance(costs, Iterable):
        raise TypeError(f"costs must be a list with a number for each layer, got {costs!r}")
    numbers = _as_integers(costs)
    check_partitions(partitions, len(numbers))
    before = [0, *accumulate(numbers)]
    span = max(before) - min(before)  # no partition costs more
    rising = min(numbers) >= 0
    if objective == "variance":
        bound = span
    elif rising:
        bound = _least_bound(before, partitions)
    else:
        bound = _least_bound_of_any(before, partitions)
    starts = _Starts(before, partitions, bound, span, rising).solve()
    return [end - start for start, end in pairwise([*starts, len(numbers)])]


def check_partitions(partitions: int, num_layers: int) -> None:
    """Refuses a number of partitions that layers cannot be cut into.

    Raises:
        TypeError: it is no integer.
        ValueError: it is not positive, or more than there are layers.
    """
    try:
        number = operator.index(partitions)
    except TypeError:
        raise TypeError(f"partitions must be a positive integer, got {partitions!r}") from None
    if number < 1:
        raise ValueError(f"partitions must be a positive integer ({partitions} < 1)")
    if num_layers < partitions:
        raise ValueError(f"sequence is shorter than intended partitions ({num_layers} < {partitions})")


def _as_integers(costs: Iterable[float]) -> list[int]:
    """All of them times the least number that makes each an integer."""
    fractions: list[Fraction] = []
    for layer, cost in enumerate(costs):
        try:
            fractions.append(Fraction(cost if isinstance(cost, Rational) else float(cost)))
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"the cost of layer {layer} must be a finite number, got {cost!r}") from None
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    return [fraction.numerator * (scale // fraction.denominator) for fraction in fractions]


def _least_bound(before: Sequence[int], partitions: int) -> int:
    """What the dearest partition costs at least, if no cost is negative."""

    def fits(bound: int) -> bool:
        # Each partition takes all it can. Fewer partitions are as good as all: one more cut costs nothing.
        end = 0
        for _ in range(partitions):
            end = bisect_right(before, before[end] + bound) - 1
        return end == len(before) - 1

    low = max(max(b - a for a, b in pairwise(before)), -(-before[-1] // partitions))
    high = before[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _least_bound_of_any(before: Sequence[int], partitions: int) -> int:
    """What the dearest partition costs at least, whatever the signs."""
    num_layers = len(before) - 1
    # best[n]: the same over the first n layers in k partitions; those of fewer layers are still of k - 1.
    best = list(before)
    for k in range(2, partitions + 1):
        for n in range(num_layers, k - 1, -1):
            end = before[n]
            best[n] = min(max(best[j], end - before[j]) for j in range(k - 1, n))
    return best[num_layers]


class _Starts:
    """Finds where partitions begin: those that cost at most a bound, with the least sum of squares.

    Their number and sum are given, so the least sum of squares is the least variance. With ``best_k[n]`` for
    the first n layers in k partitions, of which the last begins at layer j::

        best_k[n] = min over j of best_{k-1}[j] + f(before[n] - before[j])

    f is the square, and beyond the bound so much more that no cut within it can be worse. It is convex, so
    where ``before`` never falls the best j never falls with n either: a row's middle halves the search.

    Args:
        before: what all layers before each one cost, and what all cost.
        partitions: how many.
        bound: what each may cost; there must be such a cut.
        span: what none costs more than.
        rising: whether ``before`` never falls.
    """

    def __init__(self, before: Sequence[int], partitions: int, bound: int, span: int, rising: bool) -> None:
        self._before, self._partitions, self._bound, self._rising = before, partitions, bound, rising
        self._fine = partitions * span * span + 1
        self._best: list[int] = []
        self._next: list[int] = []
        self._start: list[int] = []

    def solve(self) -> list[int]:
        """The first layer of each partition."""
        before, partitions = self._before, self._partitions
        num_layers = len(before) - 1
        self._next = [self._squares([0], n, [0])[0] for n in range(num_layers + 1)]
        table: list[list[int]] = []
        for k in range(2, partitions + 1):
            self._best, self._next, self._start = self._next, [0] * (num_layers + 1), [0] * (num_layers + 1)
            last = num_layers - partitions + k  # each later partition takes a layer
            self._fill(max(k, 1), last, k - 1, last - 1)
            table.append(self._start)
        starts, end = [], num_layers
        for start in reversed(table):
            end = start[end]
            starts.append(end)
        return [0, *reversed(starts)]

    def _fill(self, first: int, last: int, low: int, high: int) -> None:
        """Solves for the first to last n, whose best j are from low to high."""
        if first > last:
            return
        n = (first + last) // 2
        begin, end = low, min(high, n - 1)
        squares = self._squares(self._before[begin : end + 1], n, self._best[begin : end + 1])
        self._next[n] = min(squares)
        self._start[n] = best = begin + squares.index(self._next[n])
        self._fill(first, n - 1, low, best if self._rising else high)
        self._fill(n + 1, last, best if self._rising else low, high)

    def _squares(self, before: Sequence[int], n: int, best: Sequence[int]) -> list[int]:
        end, bound, fine = self._before[n], self._bound, self._fine
        return [
            b + (c := end - x) * c if end - x <= bound else b + (end - x) ** 2 + fine * (end - x - bound)
            for x, b in zip(before, best, strict=True)
        ]
