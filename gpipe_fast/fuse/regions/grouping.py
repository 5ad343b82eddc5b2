"""Which units become a region: those that together read and write fewer bytes.

Greedy: of all pairs of groups that share a tensor, the pair that saves most is merged first, as long as one
pass over rows and columns computes both, and no other node stands between them.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import Tensor, fx

from gpipe_fast.fuse.regions.axes import Conflict
from gpipe_fast.fuse.regions.graph import Unit, UnitGraph
from gpipe_fast.fuse.regions.kernel import partial_sum_bytes
from gpipe_fast.fuse.regions.loops import Access, Region, loops_of
from gpipe_fast.fuse.regions.order import Order
from gpipe_fast.fuse.regions.values import Value, root_of
from gpipe_fast.fuse.rewriter import moved_bytes
from gpipe_fast.lower.alias import Source, source_of

# Limits of one kernel: its registers, and the time to compile it.
MAX_UNITS, MAX_TENSORS, MAX_SUMS = 64, 24, 6

# The share of its bytes that a region saves at least; for less, ATen's bits are kept.
MIN_SAVED = 1 / 16
# The bytes that a region's kernel moves at least. Below, launches take the time, and compiling takes seconds.
# The limit is an estimate: no GPU has compared tiny stages with and without fused kernels in rotated order
# (`python -m bench cuda tiny-always`). Tests of small shapes set the environment variable to 0.
MIN_REGION_BYTES, _MIN_REGION_BYTES_VARIABLE = 64 << 10, "GPIPE_FAST_MIN_REGION_BYTES"

Decides = Callable[[fx.Node], bool]


def regions_of(nodes: Sequence[fx.Node], leave: Decides) -> list[Region]:
    """Groups the nodes of a graph.

    Args:
        nodes: the nodes of a stage's graph, each after its inputs.
        leave: whether regions must not compute a node.

    Returns:
        The regions of two units or more, in the graph's order.
    """
    return _Grouping(nodes, leave).regions()


class _Grouping:
    def __init__(self, nodes: Sequence[fx.Node], leave: Decides) -> None:
        self._graph = UnitGraph(nodes)
        self._min_bytes = int(os.environ.get(_MIN_REGION_BYTES_VARIABLE, MIN_REGION_BYTES))
        units = [u for u in self._graph.units if not leave(u.node)]
        self._units: dict[int, list[Unit]] = {i: [unit] for i, unit in enumerate(units)}  # by group
        self._group = {unit: i for i, unit in enumerate(units)}
        # By value: the units that read it, and the other nodes.
        self._readers: dict[Value, list[Unit]] = {}
        self._others: dict[Value, list[fx.Node]] = {}
        self._plans: dict[frozenset[Unit], Region | None] = {}
        self._sources: dict[fx.Node, Source] = {}
        self._find_readers(nodes)
        self._order = self._make_order(nodes, units)

    def regions(self) -> list[Region]:
        self._merge()
        regions = [r for r in map(self._region, self._units.values()) if r is not None]
        return sorted(regions, key=lambda r: r.units[0].position)

    def _region(self, units: Sequence[Unit]) -> Region | None:
        """Returns the region of units; None if it is too small, or saves too little."""
        found = self._plan(units)
        if found is None or len(found.units) < 2 or not found.outputs:
            return None
        before, moved = sum(moved_bytes(unit.node) for unit in units), self._moved(found)
        if moved < self._min_bytes:
            return None
        saved = before - moved
        return replace(found, saved=saved) if saved >= MIN_SAVED * before else None

    def _find_readers(self, nodes: Iterable[fx.Node]) -> None:
        for unit in self._graph.units:
            for value in unit.reads:
                if unit in self._group:
                    self._readers.setdefault(value, []).append(unit)
                else:
                    self._others.setdefault(value, []).append(unit.node)
        computed = {u.node for u in self._graph.units}
        for node in nodes:
            if node in self._graph.transparent or node in computed:
                continue
            for read in node.all_input_nodes:
                if isinstance(read.meta.get("val"), Tensor):
                    self._others.setdefault(root_of(self._graph.value_of(read)), []).append(node)

    def _make_order(self, nodes: Iterable[fx.Node], units: Sequence[Unit]) -> Order:
        """Returns the order of groups, and of all other nodes, whose numbers follow."""
        groups = {u.node: i for i, u in enumerate(units)}
        number: dict[fx.Node, int] = {}
        readers: dict[int, set[int]] = {}
        for i, node in enumerate(nodes):
            if node in self._graph.transparent:
                number[node] = number[node.all_input_nodes[0]]
                continue
            number[node] = groups.get(node, len(units) + i)
            readers[number[node]] = set()
            for read in node.all_input_nodes:
                readers[number[read]].add(number[node])
        return Order(readers, [*readers])

    def _merge(self) -> None:
        heap: list[tuple[int, int, int]] = []
        for group in self._units:
            for other in self._adjacent(group):
                if group < other:
                    self._push(heap, group, other)
        while heap:
            saved, a, b = heapq.heappop(heap)
            if a not in self._units or b not in self._units:
                continue
            if self._saved(a, b) != -saved:  # one of them has been merged since
                self._push(heap, a, b)
                continue
            if not self._order.merge(a, b):
                continue
            self._units[a] = _united(self._units[a], self._units.pop(b))
            for unit in self._units[a]:
                self._group[unit] = a
            for other in self._adjacent(a):
                self._push(heap, a, other)

    def _push(self, heap: list[tuple[int, int, int]], a: int, b: int) -> None:
        saved = self._saved(a, b)
        if saved > 0:
            heapq.heappush(heap, (-saved, a, b))

    def _adjacent(self, group: int) -> list[int]:
        """Returns the groups that read what a group reads or computes, or compute what it reads."""
        found: set[int] = set()
        for unit in self._units[group]:
            for value in (*unit.reads, *map(root_of, unit.results.values())):
                found |= {self._group[reader] for reader in self._readers.get(value, ())}
                producer = self._graph.by_value.get(value)
                if producer in self._group:
                    found.add(self._group[producer])
        return sorted(found - {group})

    def _saved(self, a: int, b: int) -> int:
        """Returns the bytes that merging two groups saves; 0 if one kernel cannot compute both."""
        units = _united(self._units[a], self._units[b])
        before = self._bytes(self._units[a]) + self._bytes(self._units[b])
        if before <= self._bytes_of(self._inputs(units), self._stored(units)):
            return 0
        merged = self._plan(units)
        return 0 if merged is None else before - self._moved(merged)

    def _stored(self, units: Sequence[Unit]) -> tuple[fx.Node, ...]:
        """Returns the nodes of results that a group of these units stores."""
        members = set(units)
        return tuple(
            node
            for unit in units
            for node, value in unit.results.items()
            if self._is_stored(root_of(value), members)
        )

    def _is_stored(self, value: Value, members: set[Unit]) -> bool:
        """Returns whether a result of members is read by anything else."""
        return bool(self._others.get(value)) or not members.issuperset(self._readers.get(value, ()))

    def _plan(self, units: Sequence[Unit]) -> Region | None:
        """Returns the region of units; None if one kernel cannot compute them."""
        key = frozenset(units)
        if key not in self._plans:
            self._plans[key] = self._make(units)
        return self._plans[key]

    def _make(self, units: Sequence[Unit]) -> Region | None:
        stored = [Access(node, self._graph.value_of(node)) for node in self._stored(units)]
        read = [Access(node, self._graph.value_of(node)) for node in self._inputs(units)]
        if len(units) > MAX_UNITS or len(read) + len(stored) > MAX_TENSORS:
            return None
        tensors = {access.value: access.tensor for access in (*read, *stored)}
        try:
            loops = loops_of(units, [a.value for a in stored], tensors)
        except Conflict:
            return None
        if len(loops.column_sums) > MAX_SUMS:
            return None
        return Region(tuple(units), loops, tuple(read), tuple(stored))

    def _inputs(self, units: Sequence[Unit]) -> list[fx.Node]:
        own = {v for u in units for v in u.values}
        reads = dict.fromkeys(r for u in units for r in u.reads if r not in own)
        return [self._graph.node_of[r] for r in reads]

    def _bytes(self, units: Sequence[Unit]) -> int:
        region = self._plan(units)
        if region is not None:
            return self._moved(region)
        return self._bytes_of(self._inputs(units), self._stored(units))

    def _moved(self, region: Region) -> int:
        nodes = ([a.node for a in accesses] for accesses in (region.inputs, region.outputs))
        return self._bytes_of(*nodes) + partial_sum_bytes(region)

    def _bytes_of(self, inputs: Iterable[fx.Node], outputs: Iterable[fx.Node]) -> int:
        """Returns the bytes that are moved; a tensor that is read through several views counts once."""
        read = {self._source_of(node): node.meta["val"] for node in inputs}
        return sum(map(_tensor_bytes, (*read.values(), *(node.meta["val"] for node in outputs))))

    def _source_of(self, node: fx.Node) -> Source:
        if node not in self._sources:
            self._sources[node] = source_of(node)
        return self._sources[node]


def _united(a: Iterable[Unit], b: Iterable[Unit]) -> list[Unit]:
    return sorted({*a, *b}, key=lambda unit: unit.position)


def _tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
