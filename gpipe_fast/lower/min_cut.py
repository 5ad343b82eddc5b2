"""Nested minimum cuts: which operators a backward recomputes, at every price of time.

A value is saved if the backward or a recomputed operator reads it, and if its own operator is not recomputed.
For a price, the set R of recomputed operators is the one that minimises::

    bytes of the saved values + price * time of the operators in R

This is a minimum cut: an operator on the source's side is recomputed. With a growing price R only loses
operators (G. Gallo, M. Grigoriadis and R. Tarjan, "A fast parametric maximum flow algorithm", 1989), so that
the cuts of all prices are nested. At a price where R changes, several sets are optimal, and they are closed
sets of the residual network (J.-C. Picard and M. Queyranne, "On the structure of all minimum cuts in a
network", 1980)::

    bytes
      |                                * R = {}
      |                     *  a chain of closed sets: all have the same cost
      |               *                at the price, the slope of the line
      | *  R = all operators
      +-------------------------------- time saved

All numbers are integers, so that equal costs are equal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

_SOURCE, _SINK = 0, 1

Recomputed = frozenset[int]


class Operator(NamedTuple):
    """An operator of the forward.

    Attributes:
        time: the time that it takes; positive.
        reads: the values that it reads, as indices.
    """

    time: int
    reads: frozenset[int]


class SaveableValue(NamedTuple):
    """A value of the forward that can be saved.

    Attributes:
        size: in bytes.
        operator: the index of the operator that computes the value.
        in_backward: whether the backward reads the value.
    """

    size: int
    operator: int
    in_backward: bool


class Choices:
    """The choices of what to save and what to recompute.

    Attributes:
        operators: the operators, each after those whose values it reads.
        values: the values.
    """

    def __init__(self, operators: Sequence[Operator], values: Sequence[SaveableValue]) -> None:
        self.operators, self.values = operators, values

    @cached_property
    def _readers(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.values]
        for index, operator in enumerate(self.operators):
            for value in operator.reads:
                found[value].append(index)
        return found

    @cached_property
    def _computed(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.operators]
        for index, value in enumerate(self.values):
            found[value.operator].append(index)
        return found

    def saved(self, recomputed: Recomputed, among: Collection[int] | None = None) -> set[int]:
        """Returns the values that are saved, or those of them that are ``among`` some values."""
        return {
            i
            for i in (range(len(self.values)) if among is None else among)
            if self.values[i].operator not in recomputed
            and (self.values[i].in_backward or not recomputed.isdisjoint(self._readers[i]))
        }

    def cost(self, recomputed: Recomputed) -> tuple[int, int]:
        """Returns the bytes of the saved values, and the time of the recomputed operators."""
        return self._size(self.saved(recomputed)), sum(self.operators[i].time for i in recomputed)

    def _size(self, values: Collection[int]) -> int:
        return sum(self.values[i].size for i in values)

    def touched(self, operators: Collection[int]) -> set[int]:
        """Returns the values that some operators read or compute: only these can change with them."""
        return {v for i in operators for v in (*self.operators[i].reads, *self._computed[i])}

    def all_recomputed(self) -> Recomputed:
        """Returns the operators that the backward needs if nothing is saved."""
        found: set[int] = set()
        pending = [value.operator for value in self.values if value.in_backward]
        while pending:
            operator = pending.pop()
            if operator not in found:
                found.add(operator)
                pending += [self.values[i].operator for i in self.operators[operator].reads]
        return frozenset(found)

    def nested(self) -> Iterator[Recomputed]:
        """Yields optimal sets of recomputed operators, each within the one before it, down to none.

        Each is optimal for some price. Between two of them there is no further one that is.
        """
        whole, none = self.all_recomputed(), Recomputed()
        yield whole
        pending = [(whole, self.cost(whole), none, self.cost(none))] if whole else []
        while pending:
            most, (few_bytes, long), least, (many_bytes, short) = pending.pop()
            price = Fraction(many_bytes - few_bytes, long - short)
            network, node_of = self._network(most - least, least, price)
            reached = network.saturate()
            found = least | {i for i, node in node_of.items() if reached[node] >= 0}
            changed = self.touched(found - least)
            size = (
                many_bytes + self._size(self.saved(found, changed)) - self._size(self.saved(least, changed))
            )
            time = short + sum(self.operators[i].time for i in found - least)
            if size + price * time < few_bytes + price * long:
                pending.append((found, (size, time), least, (many_bytes, short)))
                pending.append((most, (few_bytes, long), found, (size, time)))
                continue
            chain, operator_of = [least], {node: i for i, node in node_of.items()}
            for component in network.components():
                own = [operator_of[node] for node in component if node in operator_of]
                if own:
                    chain.append(chain[-1].union(own))
            assert chain[-1] == most
            yield from reversed(chain[:-1])

    def _network(
        self, free: Recomputed, recomputed: Recomputed, price: Fraction
    ) -> tuple[_Network, dict[int, int]]:
        """Returns the network whose cuts decide about ``free`` operators, and the node of each of these.

        Of the others, only those in ``recomputed`` are.
        """
        network = _Network()
        node_of = {i: network.add_node() for i in sorted(free)}
        for i, node in node_of.items():
            network.add_edge(node, _SINK, self.operators[i].time * price.numerator)
        touched = sorted(self.touched(free))
        endless = 1 + self._size(touched) * price.denominator
        for i in touched:
            value = self.values[i]
            if value.operator in recomputed:
                continue
            target = node_of.get(value.operator, _SINK)
            own = [node_of[reader] for reader in self._readers[i] if reader in free]
            if value.in_backward or not recomputed.isdisjoint(self._readers[i]):
                own = [_SOURCE]
            if len(own) > 1:  # the value is paid once, whichever of them reads it
                both = network.add_node()
                for reader in own:
                    network.add_edge(reader, both, endless)
                own = [both]
            if own and (own[0], target) != (_SOURCE, _SINK):
                network.add_edge(own[0], target, value.size * price.denominator)
        return network, node_of


class _Network:
    """A flow network; edge ``i ^ 1`` is the reverse of edge ``i``."""

    def __init__(self) -> None:
        self._edges: list[list[int]] = [[], []]
        self._ends: list[int] = []
        self._left: list[int] = []  # the capacity that no flow uses

    def add_node(self) -> int:
        self._edges.append([])
        return len(self._edges) - 1

    def add_edge(self, begin: int, end: int, capacity: int) -> None:
        for node, other, left in ((begin, end, capacity), (end, begin, 0)):
            self._edges[node].append(len(self._ends))
            self._ends.append(other)
            self._left.append(left)

    def saturate(self) -> list[int]:
        """Finds a maximum flow by Dinic's algorithm; returns -1 for each node on the sink's side."""
        ends, left = self._ends, self._left
        while True:
            levels = self._levels()
            if levels[_SINK] < 0:
                return levels
            following = [iter(edges) for edges in self._edges]
            path: list[int] = []
            node = _SOURCE
            while True:
                if node == _SINK:
                    pushed = min(left[edge] for edge in path)
                    for edge in path:
                        left[edge] -= pushed
                        left[edge ^ 1] += pushed
                    full = next(i for i, edge in enumerate(path) if not left[edge])
                    node = ends[path[full] ^ 1]
                    del path[full:]
                    continue
                level = levels[node] + 1
                edge = next((e for e in following[node] if left[e] and levels[ends[e]] == level), -1)
                if edge >= 0:
                    path.append(edge)
                    node = ends[edge]
                elif path:
                    levels[node] = -1
                    node = ends[path.pop() ^ 1]
                else:
                    break

    def _levels(self) -> list[int]:
        """Returns each node's distance from the source in the residual network; -1 if it is not reached."""
        levels = [-1] * len(self._edges)
        levels[_SOURCE] = 0
        reached = [_SOURCE]
        for node in reached:
            for edge in self._edges[node]:
                if self._left[edge] and levels[self._ends[edge]] < 0:
                    levels[self._ends[edge]] = levels[node] + 1
                    reached.append(self._ends[edge])
        return levels

    def components(self) -> Iterator[list[int]]:
        """Yields the strongly connected components of the residual network, by Tarjan's algorithm.

        Each comes after those that it leads to.
        """
        order: dict[int, int] = {}
        low: dict[int, int] = {}
        open_nodes: list[int] = []
        closed: set[int] = set()
        for start in range(len(self._edges)):
            path = [(start, iter(self._edges[start]))] if start not in order else []
            while path:
                node, edges = path[-1]
                if node not in order:
                    order[node] = low[node] = len(order)
                    open_nodes.append(node)
                for edge in edges:
                    other = self._ends[edge]
                    if not self._left[edge] or other in closed:
                        continue
                    if other not in order:
                        path.append((other, iter(self._edges[other])))
                        break
                    low[node] = min(low[node], order[other])
                else:
                    path.pop()
                    if path:
                        low[path[-1][0]] = min(low[path[-1][0]], low[node])
                    if low[node] == order[node]:
                        component = [open_nodes.pop()]
                        while component[-1] != node:
                            component.append(open_nodes.pop())
                        closed.update(component)
                        yield component


__all__ = ["Choices", "Operator", "Recomputed", "SaveableValue"]
