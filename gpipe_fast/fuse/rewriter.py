"""Replaces nodes of a stage's graph, and keeps it functional, free of cycles and in order."""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from gpipe_fast.fuse.replacement_check import results_of
from gpipe_fast.lower.alias import source_of
from gpipe_fast.lower.launch import CheckFunction, is_launch
from gpipe_fast.lower.split import JOINT_POSITION, StageGraph
from gpipe_fast.torch_private.graphs import graph_module
from gpipe_fast.torch_private.operators import OpOverload, is_view_op

# The parts of a node's meta that describe its place in the model; a replacement takes them over.
_PLACE = ("custom", "partitioner_tag", JOINT_POSITION)


class Rewriter:
    """A stage's graph while its nodes are replaced.

    Attributes:
        graph: the graph; nodes are in order again after `finish`.
    """

    def __init__(self, stage_graph: StageGraph) -> None:
        self._stage_graph = stage_graph
        self.graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        for node in stage_graph.module.graph.nodes:
            self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)
        self._position = {node: float(i) for i, node in enumerate(self.graph.nodes)}
        self._replaced_by: dict[fx.Node, fx.Node] = {}

    def dead(self, outputs: Sequence[fx.Node], inner: Iterable[fx.Node]) -> set[fx.Node]:
        """Returns what becomes superfluous if a fragment computes the outputs: them, and inner nodes."""
        dead = set(outputs)
        candidates = {*inner} - dead
        changed = True
        while changed:
            found = {n for n in candidates if all(u in dead for u in n.users)}
            changed = bool(found)
            dead |= found
            candidates -= found
        return dead

    def replace(
        self,
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        fragment: fx.Graph,
        check: CheckFunction | None = None,
        checked: Sequence[fx.Node] = (),
    ) -> dict[fx.Node, fx.Node]:
        """Computes the outputs by a fragment, and removes the nodes that are not used any more.

        Args:
            inputs: the nodes in place of the fragment's placeholders.
            outputs: the nodes that are replaced, in the order of the fragment's results.
            fragment: a graph whose output is a tuple of nodes.
            check: a function to call after the fragment's launches until it is done; see `CheckFunction`.
            checked: the nodes that it reads.

        Returns:
            The new node of each of the fragment's nodes.
        """
        copies = dict(zip(fragment.find_nodes(op="placeholder"), inputs, strict=True))
        first = min(outputs, key=self._position.__getitem__)
        with self.graph.inserting_before(first):
            for node in fragment.nodes:
                if node.op in ("placeholder", "output"):
                    continue
                copy = copies[node] = self.graph.node_copy(node, copies.__getitem__)
                copy.meta = {"val": node.meta.get("val"), **_place(first)}
                self._position[copy] = self._position[first]
        (results,) = fragment.output_node().args
        assert isinstance(results, (list, tuple))
        for old, result in zip(outputs, results, strict=True):
            new = copies[result]
            if new not in inputs:
                new.meta |= _place(old)
                self._position[new] = self._position[old]
            old.replace_all_uses_with(new)
            self._replaced_by[old] = new
        if check is not None:  # before nodes are removed that the check alone reads
            _add_check(fragment, copies, check, checked)
        self._remove_unused(outputs)
        return copies

    def _remove_unused(self, nodes: Iterable[fx.Node]) -> None:
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if node.users or node.op != "call_function" or node not in self._position:
                continue
            pending += node.all_input_nodes
            del self._position[node]
            self.graph.erase_node(node)

    def reference(
        self,
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        within: Container[fx.Node] | None = None,
    ) -> tuple[fx.Graph, list[fx.Node]]:
        """Copies the nodes that compute the outputs.

        Args:
            inputs: the nodes that become the first placeholders.
            outputs: the nodes that become the results.
            within: the only nodes to copy, besides views; by default all nodes behind the inputs.

        Returns:
            The graph, and the node of each of its placeholders: the inputs, and what else the copied nodes
            read.
        """
        graph, given = fx.Graph(), list(inputs)
        copies = {node: graph.placeholder(f"input_{i}") for i, node in enumerate(given)}
        last = graph.call_function(tuple)  # placeholders stand before it
        pending = list(reversed(outputs))
        while pending:
            node = pending[-1]
            if node in copies:
                pending.pop()
            elif node.op != "call_function" or not (within is None or node in within or _is_view(node)):
                with graph.inserting_before(last):
                    copies[node] = graph.placeholder(f"input_{len(given)}")
                given.append(node)
            elif missing := [n for n in node.all_input_nodes if n not in copies]:
                pending += reversed(missing)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.erase_node(last)
        graph.output(tuple(copies[node] for node in outputs))
        return graph, given

    def between(self, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> set[fx.Node]:
        """Returns the nodes that compute the outputs from the inputs, outputs included."""
        found: set[fx.Node] = set()
        pending = list(outputs)
        while pending:
            node = pending.pop()
            if node not in found and node not in inputs:
                found.add(node)
                pending += node.all_input_nodes
        return found

    def current(self, node: fx.Node) -> fx.Node:
        """Returns the node that now computes a node's value."""
        while node in self._replaced_by:
            node = self._replaced_by[node]
        return node

    def finish(self) -> StageGraph:
        """Returns the stage's graph with all replacements, its nodes in order."""
        old = self._stage_graph
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.in_order():
            copies[node] = graph.node_copy(node, copies.__getitem__)
        (results,) = graph.output_node().args
        assert isinstance(results, (list, tuple))
        inputs = tuple(port._replace(node=copies[self._copies[port.node]]) for port in old.inputs)
        outputs = tuple(port._replace(node=node) for port, node in zip(old.outputs, results, strict=True))
        module = graph_module(old.module, graph)
        return replace(old, module=module, inputs=inputs, outputs=outputs)

    def in_order(self) -> list[fx.Node]:
        """Returns all nodes, each after its inputs, else in their original order."""
        number = {node: index for index, node in enumerate(self.graph.nodes)}
        missing = {node: len(node.all_input_nodes) for node in self.graph.nodes}
        after_checks = self._after_checks()
        for node in itertools.chain(*after_checks.values()):
            missing[node] += 1
        ready = [(*self._key(n, number), n) for n, count in missing.items() if not count]
        heapq.heapify(ready)
        found: list[fx.Node] = []
        output: list[fx.Node] = []
        while ready:
            *_, node = heapq.heappop(ready)
            (output if node.op == "output" else found).append(node)
            for user in (*node.users, *after_checks.get(node, ())):
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, (*self._key(user, number), user))
        return found + output

    def _after_checks(self) -> dict[fx.Node, list[fx.Node]]:
        """Returns, by launch, the nodes that read what the launch's check overwrites if it is wrong."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in filter(is_launch, self.graph.nodes):
            *_, earlier = node.args
            assert isinstance(earlier, (list, tuple))
            before = self.between((), [node]) if earlier else set()
            users = {user for n in earlier if isinstance(n, fx.Node) for user in n.users}
            found[node] = [user for user in users if user not in before]
        return found

    def _key(self, node: fx.Node, number: Mapping[fx.Node, int]) -> tuple[float, int]:
        return self._position[node], number[node]


def _add_check(
    fragment: fx.Graph, copies: Mapping[fx.Node, fx.Node], check: CheckFunction, inputs: Sequence[fx.Node]
) -> None:
    """Makes the last launch of a replacement check all of its launches."""
    last = next(n for n in reversed(fragment.nodes) if is_launch(n))
    earlier = [copies[n] for n in results_of(fragment) if n.args[0] is not last]
    launch, arguments, *_ = copies[last].args
    copies[last].args = (launch, arguments, check, tuple(inputs), tuple(earlier))  # type: ignore[assignment]


def _is_view(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and (
        is_view_op(target) or target is torch.ops.aten._unsafe_view.default
    )


def _place(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in _PLACE if key in node.meta}


def moved_bytes(node: fx.Node) -> int:
    """Returns the bytes that a node reads and writes; none for views, placeholders and selected results."""
    if node.op != "call_function" or node.target is operator.getitem or source_of(node).base is not node:
        return 0
    if isinstance(node.target, OpOverload) and is_view_op(node.target):
        return 0
    value = node.meta.get("val")
    results = value if isinstance(value, (list, tuple)) else (value,)
    reads = {source_of(n): n.meta.get("val") for n in node.all_input_nodes}
    return sum(_bytes(t) for t in (*results, *reads.values()))


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
