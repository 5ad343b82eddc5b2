"""The order of groups while they are merged, against a search for cycles."""

from __future__ import annotations

import random

import pytest

from gpipe_fast.fuse.regions.order import Order

Edges = set[tuple[int, int]]


def _order(edges: Edges, count: int) -> Order:
    readers = {i: [b for a, b in edges if a == i] for i in range(count)}
    return Order(readers, range(count))


def _reaches(edges: Edges, start: int, end: int, without_edge: bool) -> bool:
    """Returns whether a path leads from one group to another, perhaps only over a third."""
    seen, pending = {start}, [start]
    while pending:
        group = pending.pop()
        for a, b in edges:
            if a != group or b in seen or (without_edge and (a, b) == (start, end)):
                continue
            if b == end:
                return True
            seen.add(b)
            pending.append(b)
    return False


@pytest.mark.parametrize("seed", range(40))
def test_merges_of_random_graphs_are_refused_exactly_if_they_make_a_cycle(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(2, 14)
    density = rng.choice((0.1, 0.2, 0.4))
    edges = {(a, b) for b in range(count) for a in range(b) if rng.random() < density}
    order, groups = _order(edges, count), set(range(count))
    while len(groups) > 1 and rng.random() < 0.95:
        a, b = rng.sample(sorted(groups), 2)
        cycle = _reaches(edges, a, b, True) or _reaches(edges, b, a, True)
        assert order.merge(a, b) != cycle
        if cycle:
            continue
        groups.discard(b)
        merged = {(a if x == b else x, a if y == b else y) for x, y in edges}
        edges = {(x, y) for x, y in merged if x != y}
        assert order.find(b) == a
