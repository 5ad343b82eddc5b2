"""The pass: replaces nodes that are limited by memory traffic by launches of fused kernels.

A rounding error may flip a decision: a comparison, a cast to integers, or the choice of an element. With
``relu``, the gradient of an element is kept or not; with routing, a token goes to another expert. All other
values change by a rounding error only. So a forward and its recompute fuse what decides in the same way.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gpipe_fast.fuse.cubins import KernelLoader
from gpipe_fast.fuse.families import cases
from gpipe_fast.fuse.family import Case
from gpipe_fast.fuse.launchers import CannotLaunch, launches_in
from gpipe_fast.fuse.left_out import leave_out, reason_of
from gpipe_fast.fuse.left_to_pytorch import KERNEL_LEFT_OUT, OTHER_LAYOUT, Left, left_in
from gpipe_fast.fuse.patterns import Graph, Match
from gpipe_fast.fuse.regions.grouping import MIN_SAVED, reasons_alone, regions_of
from gpipe_fast.fuse.regions.kernel import fragment_of
from gpipe_fast.fuse.regions.loops import Region
from gpipe_fast.fuse.replacement_check import ReplacementCheck, has_passed
from gpipe_fast.fuse.rewriter import Rewriter
from gpipe_fast.lower.launch import KernelLaunch
from gpipe_fast.lower.split import JOINT_POSITION, StageGraph

aten = torch.ops.aten
# Gradients that compare an input with a number themselves.
_COMPARE = frozenset(
    {
        aten.threshold_backward.default,
        aten.leaky_relu_backward.default,
        aten.hardtanh_backward.default,
        aten.hardswish_backward.default,
        aten.hardsigmoid_backward.default,
        aten.elu_backward.default,
    }
)
# Operators that also return indices.
_CHOOSE = frozenset(
    {
        aten.max.dim,
        aten.min.dim,
        aten.median.dim,
        aten.kthvalue.default,
        aten.topk.default,
        aten.sort.default,
        aten.sort.stable,
        aten.max_pool2d_with_indices.default,
        aten.max_pool3d_with_indices.default,
        aten.adaptive_max_pool2d.default,
        aten.adaptive_max_pool3d.default,
        aten.fractional_max_pool2d.default,
    }
)


@dataclass(frozen=True)
class Replaced:
    """One replacement.

    Attributes:
        name: the name of a family's case, as in ``rotary, cast``; of a region its operators.
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
    """A fused graph, what was replaced in it, in order, and what was left, if `fuse` explains it."""

    graph: StageGraph
    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...] = ()

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


# Returns why a launch's kernel is left out; None if it can be used.
ReasonOf = Callable[[KernelLaunch], str | None]
# Decides about a launch.
Predicate = Callable[[KernelLaunch], bool]


def fuse(
    graph: StageGraph,
    unfit: ReasonOf = lambda launch: None,
    unchecked: Predicate = lambda launch: False,
    kept: Container[int] = (),
    explain: bool = False,
) -> Fused:
    """Fuses the nodes of one graph of a stage.

    Args:
        graph: the graph.
        unfit: returns why a kernel is left out, whose nodes are then not replaced; None for other kernels.
        unchecked: returns True for kernels that are to be compared with the nodes that they replace, the
            first time that they run.
        kept: positions, in the joint graph, of nodes that no region computes, and that are replaced only
            together with gradients.
        explain: whether to find out why nodes are left.

    Returns:
        A graph that computes the same values, not bit for bit.
    """
    pass_ = _Pass(graph, unfit, unchecked, kept)
    pass_.run(cases(_dtypes(graph)))
    pass_.replace_regions(explain)
    fused = pass_.rewriter.finish()
    return Fused(fused, tuple(pass_.replaced), left_in(fused, pass_.reasons) if explain else ())


def _dtypes(graph: StageGraph) -> frozenset[object]:
    values = (node.meta.get("val") for node in graph.module.graph.nodes)
    return frozenset(value.dtype for value in values if isinstance(value, Tensor))


@dataclass
class _Candidate:
    name: str
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    inner: set[fx.Node]
    fragment: fx.Graph
    within: Container[fx.Node] | None = None
    saved: int = 0


class _Pass:
    def __init__(
        self, graph: StageGraph, unfit: ReasonOf, unchecked: Predicate, kept: Container[int]
    ) -> None:
        self.rewriter = Rewriter(graph)
        self.replaced: list[Replaced] = []
        self.reasons: dict[str, str] = {}  # by node, why it is left
        self._unfit = unfit
        self._unchecked = unchecked
        self._kept = kept

    def run(self, all_cases: Iterable[Case]) -> None:
        """Makes the replacements that save most first, gradients before what is only recomputed for them."""
        self.rewriter.merge_equal_casts()
        search = Graph(self.rewriter.graph)
        found: dict[int, list[_Candidate]] = {}
        for case in all_cases:
            if not search.has(case.anchor) or not search.may_have_inputs(case.arguments):
                continue
            if search.may_have(case.traced):
                candidates = (self._candidate(case, match) for match in search.matches(case.traced))
                found.setdefault(case.phase, []).extend(c for c in candidates if c is not None)
        for phase in sorted(found):
            self._replace_best(found[phase])

    def replace_regions(self, explain: bool = False) -> None:
        """Replaces regions, in the graph's order."""
        nodes = self.rewriter.in_order()
        if explain:
            self.reasons = reasons_alone(nodes, self._is_kept) | self.reasons
        regions = regions_of(nodes, self._is_kept)
        # A region may compute again what an earlier one has computed, from values that nothing else reads.
        self.rewriter.reserve(access.node for region in regions for access in region.inputs)
        for region in regions:
            reason = self._replace_region(region)
            if reason is not None:
                self.reasons |= {unit.node.name: reason for unit in region.units}
        self.rewriter.release()

    def _why_left_out(self, fragment: fx.Graph) -> str | None:
        reason = next(filter(None, map(self._unfit, launches_in(fragment))), None)
        return None if reason is None else KERNEL_LEFT_OUT + reason

    def _is_kept(self, node: fx.Node) -> bool:
        return any(position in self._kept for position in _positions([node]))

    def _replace_region(self, region: Region) -> str | None:
        """Replaces a region, or returns the reason why not."""
        try:
            fragment = fragment_of(region)
        except CannotLaunch as reason:
            return str(reason)
        if left_out := self._why_left_out(fragment):
            return left_out
        inputs = [self.rewriter.current(access.node) for access in region.inputs]
        outputs = [access.node for access in region.outputs]
        if not _has_layouts_of(fragment, outputs):
            return OTHER_LAYOUT
        name = ", ".join(region.operators)
        nodes = [n for unit in region.units for n in (unit.node, *unit.results)]
        candidate = _Candidate(name, inputs, outputs, set(), fragment, {*nodes}, region.saved)
        self._replace(candidate, nodes)
        return None

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
                self._replace(candidate, candidate.outputs)

    def _candidate(self, case: Case, match: Match) -> _Candidate | None:
        inputs = [match.nodes[n] for n in case.traced.inputs]
        outputs = [match.nodes[n] for n in case.traced.outputs]
        if case.phase and any(position in self._kept for position in _positions(outputs)):
            return None
        inner = self.rewriter.between(inputs, outputs)
        if len({*outputs}) < len(outputs) or not all(n.meta["val"].numel() for n in (*inputs, *outputs)):
            return None
        fragment = case.fragment(match.numbers, [n.meta["val"] for n in inputs])
        if fragment is None:
            return None
        if left_out := self._why_left_out(fragment):
            self.reasons |= dict.fromkeys((n.name for n in outputs), left_out)
            return None
        if not _has_layouts_of(fragment, outputs):
            return None
        return _Candidate(case.name, inputs, outputs, inner, fragment)

    def _saves(self, candidate: _Candidate) -> bool:
        """Returns whether a replacement is possible and worthwhile now; sets how much it saves."""
        inputs = candidate.inputs = [self.rewriter.current(n) for n in candidate.inputs]
        outputs, inner = candidate.outputs, candidate.inner
        if not all(map(self.rewriter.alive, (*outputs, *inner))):
            return False
        if self.rewriter.makes_cycle(inputs, outputs, inner):
            return False
        before, after = self.rewriter.bytes_before_and_after(outputs, inner, candidate.fragment)
        candidate.saved = before - after
        return candidate.saved >= MIN_SAVED * before

    def _replace(self, candidate: _Candidate, nodes: Sequence[fx.Node]) -> None:
        """Makes a replacement. The kernels compute the values of ``nodes``, all or the results."""
        names, positions = tuple(n.name for n in candidate.outputs), _positions(nodes)
        inputs, outputs, fragment = candidate.inputs, candidate.outputs, candidate.fragment
        launches = launches_in(fragment)
        check, checked = None, list[fx.Node]()
        if any(map(self._unchecked, launches)):
            reference, checked = self.rewriter.reference(inputs, outputs, candidate.within)
            check = ReplacementCheck(reference, fragment, outputs[0].meta["val"].device)
        self.rewriter.replace(inputs, outputs, fragment, check, checked)
        kernels = tuple(launch.name for launch in launches)
        self.replaced.append(Replaced(candidate.name, names, positions, kernels, candidate.saved))


def fuse_alike(
    forward: StageGraph,
    backward: StageGraph,
    unfit: ReasonOf,
    unchecked: Predicate,
    explain: bool = False,
) -> tuple[Fused, Fused]:
    """Fuses a forward and its backward so that a recompute decides as the forward did.

    A comparison, as in ReLU or in routing, might decide differently if the recompute rounds in another way.
    So a node on which a decision depends, and that kernels compute in one graph but not in the other, is left
    in both.

    Args:
        forward: the forward.
        backward: the backward, which may recompute nodes of the forward.
        unfit: as in `fuse`.
        unchecked: as in `fuse`.
        explain: as in `fuse`.
    """
    decisive = decisive_positions(forward) | decisive_positions(backward)
    kept: set[int] = set()
    while True:
        first, second = (fuse(graph, unfit, unchecked, kept, explain) for graph in (forward, backward))
        differ = first.fused_positions() & second.other_positions()
        differ |= second.fused_positions() & first.other_positions()
        differ &= decisive
        if differ <= kept:
            return first, second
        kept |= differ


def _positions(nodes: Iterable[fx.Node]) -> frozenset[int]:
    return frozenset(n.meta[JOINT_POSITION] for n in nodes if JOINT_POSITION in n.meta)


def _has_layouts_of(fragment: fx.Graph, outputs: Sequence[fx.Node]) -> bool:
    """Returns whether a fragment's results lie in memory as the nodes that they replace."""
    (results,) = fragment.output_node().args
    assert isinstance(results, (list, tuple))
    pairs = zip(results, outputs, strict=True)
    return all(_layout(new.meta["val"]) == _layout(old.meta["val"]) for new, old in pairs)


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def decisive_positions(graph: StageGraph) -> frozenset[int]:
    """Returns the positions, in the joint graph, of the nodes on which a decision depends."""
    found: set[fx.Node] = set()
    pending = [n for n in graph.module.graph.nodes if _decides(n)]
    while pending:
        for node in pending.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                pending.append(node)
    return frozenset(n.meta[JOINT_POSITION] for n in found if JOINT_POSITION in n.meta)


def _decides(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target in _COMPARE or node.target in _CHOOSE:
        return True
    value = node.meta.get("val")
    read = (n.meta.get("val") for n in node.all_input_nodes)
    return isinstance(value, Tensor) and not _is_float(value) and any(map(_is_float, read))


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


class Fusion:
    """Fuses graphs for one device."""

    def __init__(self, loader: KernelLoader | None) -> None:
        """Makes a fusion for the loader's device; None for a device that the machine need not have."""
        self._loader = loader

    def fuse(self, forward: StageGraph, backward: StageGraph | None, explain: bool = False) -> list[Fused]:
        """Fuses the graphs of a stage, and compiles and loads their kernels.

        Kernels for which that fails are left out, after a warning: PyTorch's operators compute their nodes.

        Args:
            forward: the forward.
            backward: the backward; None if there is none.
            explain: whether to find out why nodes are left.
        """
        while True:
            found = self._fuse(forward, backward, explain)
            if self._loader is None:
                return found
            launches = {launch.specialization: launch for each in found for launch in each.launches()}
            failures = self._loader.failures(list(launches.values()))
            for launch, reason in zip(launches.values(), failures, strict=True):
                if reason:
                    leave_out(launch, reason)
            if not any(failures):
                return found

    def _fuse(self, forward: StageGraph, backward: StageGraph | None, explain: bool) -> list[Fused]:
        if backward is None:
            return [fuse(forward, reason_of, self._is_unchecked, explain=explain)]
        return list(fuse_alike(forward, backward, reason_of, self._is_unchecked, explain))

    def _is_unchecked(self, launch: KernelLaunch) -> bool:
        return self._loader is not None and not has_passed(launch, self._loader.device)
