"""The pass: replaces nodes that are limited by memory traffic by launches of fused kernels."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from gpipe_fast.fuse.check import ReplacementCheck
from gpipe_fast.fuse.families import cases
from gpipe_fast.fuse.family import Case
from gpipe_fast.fuse.launchers import launches_in
from gpipe_fast.fuse.patterns import Graph, Match
from gpipe_fast.fuse.rewriter import Rewriter
from gpipe_fast.lower.launch import KernelLaunch
from gpipe_fast.lower.split import JOINT_POSITION, StageGraph


@dataclass(frozen=True)
class Replaced:
    """One replacement.

    Attributes:
        name: the family's name, as in ``add, layer norm``.
        nodes: the names of the nodes whose values the kernels compute.
        positions: the positions of these nodes in the joint graph.
        kernels: the names of the kernels.
        saved: how many bytes less are read and written.
    """

    name: str
    nodes: tuple[str, ...]
    positions: frozenset[int]
    kernels: tuple[str, ...]
    saved: int


@dataclass(frozen=True)
class Fused:
    """A fused graph, and what was replaced in it, in order."""

    graph: StageGraph
    replaced: tuple[Replaced, ...]

    def launches(self) -> list[KernelLaunch]:
        """Returns the launches of the graph, in order."""
        return launches_in(self.graph.module.graph)

    def fused_positions(self) -> frozenset[int]:
        """Returns the positions, in the joint graph, of the nodes whose values kernels compute."""
        return frozenset().union(*(each.positions for each in self.replaced))

    def other_positions(self) -> frozenset[int]:
        """Returns the positions, in the joint graph, of the nodes that are left."""
        nodes = self.graph.module.graph.nodes
        return _positions(nodes) - self.fused_positions()


# The share of its bytes that a replacement saves at least; for less, ATen's bits are kept.
MIN_SAVED = 1 / 16

# Decides about a launch.
Predicate = Callable[[KernelLaunch], bool]


def fuse(
    graph: StageGraph,
    usable: Predicate = lambda launch: True,
    unchecked: Predicate = lambda launch: False,
    kept: Container[int] = (),
) -> Fused:
    """Fuses the nodes of one graph of a stage.

    Args:
        graph: the graph.
        usable: returns False for kernels that are left out: their nodes are not replaced.
        unchecked: returns True for kernels that are to be compared with the nodes that they replace, the
            first time that they run.
        kept: positions, in the joint graph, of nodes that are replaced only together with gradients.

    Returns:
        A graph that computes the same values, not bit for bit.
    """
    pass_ = _Pass(graph, usable, unchecked, kept)
    pass_.run(cases(_dtypes(graph)))
    return Fused(pass_.rewriter.finish(), tuple(pass_.replaced))


def _dtypes(graph: StageGraph) -> frozenset[object]:
    values = (node.meta.get("val") for node in graph.module.graph.nodes)
    return frozenset(value.dtype for value in values if isinstance(value, Tensor))


@dataclass
class _Candidate:
    case: Case
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    inner: set[fx.Node]
    fragment: fx.Graph
    saved: int = 0


class _Pass:
    def __init__(
        self, graph: StageGraph, usable: Predicate, unchecked: Predicate, kept: Container[int]
    ) -> None:
        self.rewriter = Rewriter(graph)
        self.replaced: list[Replaced] = []
        self._usable = usable
        self._unchecked = unchecked
        self._kept = kept

    def run(self, all_cases: Iterable[Case]) -> None:
        """Makes the replacements that save most first, gradients before what is only recomputed for them."""
        self.rewriter.merge_equal_casts()
        search = Graph(self.rewriter.graph)
        found: dict[int, list[_Candidate]] = {}
        for case in all_cases:
            if not search.has(case.anchor, *case.also) or not case.possible(search):
                continue
            if not search.may_have_inputs(case.arguments):
                continue
            if search.may_have(case.traced):
                candidates = (self._candidate(case, match) for match in search.matches(case.traced))
                found.setdefault(case.phase, []).extend(c for c in candidates if c is not None)
        for phase in sorted(found):
            self._replace_best(found[phase])

    def _replace_best(self, candidates: Sequence[_Candidate]) -> None:
        heap = [(-c.saved, i, c) for i, c in enumerate(candidates) if self._saves(c)]
        heapq.heapify(heap)
        while heap:
            before, number, candidate = heapq.heappop(heap)
            if not self._saves(candidate):
                continue
            if -candidate.saved > before:  # an earlier replacement has taken some of it
                heapq.heappush(heap, (-candidate.saved, number, candidate))
            else:
                self._replace(candidate)

    def _candidate(self, case: Case, match: Match) -> _Candidate | None:
        inputs = [match.nodes[n] for n in case.traced.inputs]
        outputs = [match.nodes[n] for n in case.traced.outputs]
        if case.phase and any(position in self._kept for position in _positions(outputs)):
            return None
        inner = self.rewriter.between(inputs, outputs)
        if len({*outputs}) < len(outputs) or not all(n.meta["val"].numel() for n in (*inputs, *outputs)):
            return None
        fragment = case.fragment(match.numbers, [n.meta["val"] for n in inputs])
        if fragment is None or not all(map(self._usable, launches_in(fragment))):
            return None
        (results,) = fragment.output_node().args
        assert isinstance(results, (list, tuple))
        pairs = zip(results, outputs, strict=True)
        same = all(_layout(new.meta["val"]) == _layout(old.meta["val"]) for new, old in pairs)
        return _Candidate(case, inputs, outputs, inner, fragment) if same else None

    def _saves(self, candidate: _Candidate) -> bool:
        """Returns whether a replacement is possible and worthwhile now; sets how much it saves."""
        inputs = candidate.inputs = [self.rewriter.current(n) for n in candidate.inputs]
        outputs, inner = candidate.outputs, candidate.inner
        if not all(map(self.rewriter.alive, (*outputs, *inner))):
            return False
        if self.rewriter.makes_cycle(inputs, outputs, inner):
            return False
        overwritten = candidate.case.overwrites
        if overwritten is not None and not self.rewriter.owns(outputs[0], inputs[overwritten]):
            return False
        before, after = self.rewriter.bytes_before_and_after(outputs, inner, candidate.fragment)
        candidate.saved = before - after
        return candidate.saved >= MIN_SAVED * before

    def _replace(self, candidate: _Candidate) -> None:
        names, positions = tuple(n.name for n in candidate.outputs), _positions(candidate.outputs)
        kernels = tuple(launch.name for launch in launches_in(candidate.fragment))
        fragment, inputs = candidate.fragment, candidate.inputs
        reference = None
        if any(map(self._unchecked, launches_in(fragment))):
            reference = self.rewriter.reference(inputs, candidate.outputs)
        device = candidate.outputs[0].meta["val"].device
        check = None if reference is None else ReplacementCheck(reference, fragment, device)
        self.rewriter.replace(inputs, candidate.outputs, fragment, check)
        self.replaced.append(Replaced(candidate.case.name, names, positions, kernels, candidate.saved))


def fuse_alike(
    forward: StageGraph, backward: StageGraph, usable: Predicate, unchecked: Predicate
) -> tuple[Fused, Fused]:
    """Fuses a forward and its backward so that a recompute rounds as the forward did.

    Otherwise a comparison, as in ReLU or in routing, might decide differently in the recompute. A node that
    kernels compute in one graph, and that is left in the other, is left in both.

    Args:
        forward: the forward.
        backward: the backward, which may recompute nodes of the forward.
        usable: as in `fuse`.
        unchecked: as in `fuse`.
    """
    kept: set[int] = set()
    while True:
        first, second = (fuse(graph, usable, unchecked, kept) for graph in (forward, backward))
        differ = first.fused_positions() & second.other_positions()
        differ |= second.fused_positions() & first.other_positions()
        if differ <= kept:
            return first, second
        kept |= differ


def _positions(nodes: Iterable[fx.Node]) -> frozenset[int]:
    return frozenset(n.meta[JOINT_POSITION] for n in nodes if JOINT_POSITION in n.meta)


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype
