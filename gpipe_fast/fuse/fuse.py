"""The pass: replaces nodes that are limited by memory traffic by launches of fused kernels.

A rounding error may flip a decision: a comparison, a cast to integers, or the choice of an element. With
``relu``, the gradient of an element is kept or not; with routing, a token goes to another expert. All other
values change by a rounding error only. So a forward and its recompute fuse what decides in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gpipe_fast.fuse.cubins import KernelLoader
from gpipe_fast.fuse.launchers import CannotLaunch, launches_in, trace_launcher
from gpipe_fast.fuse.left_out import leave_out, reason_of
from gpipe_fast.fuse.left_to_pytorch import KEPT, KERNEL_LEFT_OUT, OTHER_LAYOUT, Left, left_in
from gpipe_fast.fuse.losses import Found, gradients_in, losses_in
from gpipe_fast.fuse.regions.grouping import regions_of
from gpipe_fast.fuse.regions.kernel import fragment_of
from gpipe_fast.fuse.regions.loops import Region
from gpipe_fast.fuse.replacement_check import ReplacementCheck, has_passed
from gpipe_fast.fuse.rewriter import Rewriter, moved_bytes
from gpipe_fast.lower.launch import KernelLaunch
from gpipe_fast.lower.split import JOINT_POSITION, StageGraph
from gpipe_fast.lower.work import is_attention

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


@dataclass(frozen=True)
class Replaced:
    """One replacement.

    Attributes:
        name: what is computed, as ``cross-entropy``; of a region its operators.
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
        kept: positions, in the joint graph, of nodes that are left, unless a gradient recomputes them itself.
        explain: whether to find out why nodes are left.

    Returns:
        A graph that computes the same values, not bit for bit.
    """
    pass_ = _Pass(graph, unfit, unchecked, kept)
    pass_.replace_losses()
    pass_.replace_regions()
    fused = pass_.rewriter.finish()
    return Fused(fused, tuple(pass_.replaced), left_in(fused, pass_.reasons) if explain else ())


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

    def replace_losses(self) -> None:
        """Replaces losses, after their gradients, which may recompute the nodes of losses themselves."""
        for search in (gradients_in, losses_in):
            for found in [*search(self.rewriter.graph)]:
                if search is gradients_in or not self._is_kept(found.output):
                    self._replace_found(found)

    def replace_regions(self) -> None:
        """Replaces regions, in the graph's order."""
        nodes = self.rewriter.in_order()
        self.reasons |= {node.name: KEPT for node in filter(self._is_kept, nodes)}
        for region in regions_of(nodes, self._is_kept):
            reason = self._replace_region(region)
            if reason is not None:
                self.reasons |= {unit.node.name: reason for unit in region.units}

    def _why_left_out(self, fragment: fx.Graph, outputs: Sequence[fx.Node]) -> str | None:
        reason = next(filter(None, map(self._unfit, launches_in(fragment))), None)
        if reason is not None:
            return KERNEL_LEFT_OUT + reason
        return None if _has_layouts_of(fragment, outputs) else OTHER_LAYOUT

    def _is_kept(self, node: fx.Node) -> bool:
        return any(position in self._kept for position in _positions([node]))

    def _replace_region(self, region: Region) -> str | None:
        """Replaces a region, or returns the reason why not."""
        try:
            fragment = fragment_of(region)
        except CannotLaunch as error:
            return str(error)
        inputs = [self.rewriter.current(access.node) for access in region.inputs]
        outputs = [access.node for access in region.outputs]
        if reason := self._why_left_out(fragment, outputs):
            return reason
        nodes = [n for unit in region.units for n in (unit.node, *unit.results)]
        self._replace(", ".join(region.operators), inputs, outputs, fragment, region.saved, nodes, {*nodes})
        return None

    def _replace_found(self, found: Found) -> None:
        """Replaces a loss or its gradient, if a program can launch its kernels."""
        inputs = [*map(self.rewriter.current, found.inputs)]
        inner = self.rewriter.between(inputs, [found.output])
        dead = self.rewriter.dead([found.output], inner)
        values = [node.meta["val"] for node in (*inputs, found.output)]
        if not all(v.numel() for v in values) or not (found.unneeded is None or found.unneeded in dead):
            return
        try:
            fragment = trace_launcher(found.launcher, values[:-1])
        except CannotLaunch:
            return
        if reason := self._why_left_out(fragment, [found.output]):
            self.reasons[found.output.name] = reason
            return
        saved = sum(map(moved_bytes, dead)) - sum(map(moved_bytes, fragment.nodes))
        self._replace(found.name, inputs, [found.output], fragment, saved, [found.output])

    def _replace(
        self,
        name: str,
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        fragment: fx.Graph,
        saved: int,
        nodes: Sequence[fx.Node],
        within: Container[fx.Node] | None = None,
    ) -> None:
        """Makes a replacement. The kernels compute the values of ``nodes``, all or the results."""
        names, positions = tuple(n.name for n in outputs), _positions(nodes)
        launches = launches_in(fragment)
        check, checked = None, list[fx.Node]()
        if any(map(self._unchecked, launches)):
            reference, checked = self.rewriter.reference(inputs, outputs, within)
            check = ReplacementCheck(reference, fragment, outputs[0].meta["val"].device)
        self.rewriter.replace(inputs, outputs, fragment, check, checked)
        kernels = tuple(launch.name for launch in launches)
        self.replaced.append(Replaced(name, names, positions, kernels, saved))


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
    return _positions(found)


def _decides(node: fx.Node) -> bool:
    if node.op != "call_function" or is_attention(node):  # whose seeds are integers
        return False
    if node.target in _COMPARE:
        return True
    value, read = node.meta.get("val"), (n.meta.get("val") for n in node.all_input_nodes)
    if isinstance(value, (list, tuple)):  # perhaps with the indices of chosen elements
        chooses = any(isinstance(each, Tensor) and each.dtype == torch.int64 for each in value)
    else:
        chooses = isinstance(value, Tensor) and not _is_float(value)
    return chooses and any(map(_is_float, read))


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
