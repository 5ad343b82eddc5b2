"""An order of groups of nodes, each after the groups that it reads from, while groups are merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


class Order:
    """A topological order of a graph of groups, without cycles."""

    def __init__(self, readers: Mapping[int, Iterable[int]], order: Sequence[int]) -> None:
        """Makes an order.

        Args:
            readers: for each group the groups that read from it.
            order: all groups, each after those that it reads from.
        """
        self._order: list[int | None] = list(order)
        self._position = {group: i for i, group in enumerate(order)}
        self._readers = {group: set(found) - {group} for group, found in readers.items()}
        self._merged: dict[int, int] = {}

    def find(self, group: int) -> int:
        """Returns the group that a group is part of now."""
        while group in self._merged:
            group = self._merged[group]
        return group

    def merge(self, a: int, b: int) -> bool:
        """Makes group ``b`` a part of group ``a``.

        Returns:
            False if a third group reads from one of them and is read by the other: nothing is changed.
        """
        first, last = sorted((a, b), key=self._position.__getitem__)
        begin, end = self._position[first], self._position[last]
        after = self._reachable(first, last, end)
        if after is None:
            return False
        window = [g for g in self._order[begin : end + 1] if g is not None and g not in (first, last)]
        moved = [g for g in window if g not in after] + [a] + [g for g in window if g in after]
        self._order[begin : end + 1] = [*moved, *[None] * (end + 1 - begin - len(moved))]
        for i, group in enumerate(moved, begin):
            self._position[group] = i
        self._merged[b] = a
        self._readers[a] = {r for r in map(self.find, self._readers[a] | self._readers.pop(b)) if r != a}
        return True

    def _reachable(self, first: int, last: int, end: int) -> set[int] | None:
        """Returns the groups up to a position that read from ``first``; None if they lead to ``last``."""
        found: set[int] = set()
        pending = [r for r in map(self.find, self._readers[first]) if r != last]
        while pending:
            group = pending.pop()
            if group == last:
                return None
            if group not in found and self._position[group] <= end:
                found.add(group)
                pending += map(self.find, self._readers[group])
        return found
