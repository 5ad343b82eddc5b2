"""Explanations of traced stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gpipe_fast.explanation.stages import FusedGroup, LeftGroup, ProgramExplanation
from gpipe_fast.lower.checkpoint import SavedFraction, has_recompute
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.split import JOINT_POSITION, StageGraph, split
from gpipe_fast.lower.work import Work, count
from gpipe_fast.runtime.compiled import CompiledStage

if TYPE_CHECKING:
    from gpipe_fast.fuse.fuse import Fused


def explain_programs(
    compiled: CompiledStage, saved_fraction: SavedFraction, microbatches: int
) -> list[ProgramExplanation]:
    """Explains a stage's forward and backward.

    Args:
        compiled: the stage.
        saved_fraction: the fraction of activations that the micro-batches save.
        microbatches: the number of these micro-batches.
    """
    traced, first = compiled.traced, compiled.stage.first_layer
    plain = split(traced.joint, saved_fraction)
    parts, fused = traced.fuse(saved_fraction, explain=True)
    programs = []
    for index, (before, graph) in enumerate(
        [(plain.forward_saving, parts.forward_saving), (plain.backward, parts.backward)]
    ):
        if before is None or graph is None:
            continue
        accumulation = [traced.accumulation] if index else []
        found = None if fused is None else fused[index]
        work = [count(lower(g, *accumulation)) for g in (before, graph if found is None else found.graph)]
        backward = "backward with recompute" if has_recompute(saved_fraction) else "backward"
        direction = backward if index else "forward"
        programs.append(_program(direction, microbatches, work, graph, found, first))
    return programs


def _program(
    direction: str,
    microbatches: int,
    work: Sequence[Work],
    graph: StageGraph,
    fused: Fused | None,
    first: int,
) -> ProgramExplanation:
    before, after = work
    return ProgramExplanation(
        direction,
        microbatches,
        before.moved,
        after.moved,
        before.launches,
        after.launches,
        () if fused is None else tuple(_fused_groups(fused, _layers(graph), first)),
        () if fused is None else tuple(_left_groups(fused, first)),
    )


def _layers(graph: StageGraph) -> dict[int, int]:
    """Returns, by position in the joint graph, a node's layer within the stage."""
    from gpipe_fast.fuse.left import layer_of

    found = {}
    for node in graph.module.graph.nodes:
        layer = layer_of(node)
        if layer is not None and JOINT_POSITION in node.meta:
            found[node.meta[JOINT_POSITION]] = layer
    return found


def _fused_groups(fused: Fused, layers: Mapping[int, int], first: int) -> Iterator[FusedGroup]:
    places: dict[tuple[tuple[str, ...], tuple[str, ...]], list[tuple[int, ...]]] = {}
    saved: dict[tuple[tuple[str, ...], tuple[str, ...]], int] = {}
    for each in fused.replaced:
        key = tuple(each.name.split(", ")), each.kernels
        own = sorted({first + layers[p] for p in each.positions if p in layers})
        places.setdefault(key, []).append(tuple(own))
        saved[key] = saved.get(key, 0) + each.saved
    for operators, kernels in sorted(places, key=lambda key: -saved[key]):
        key = operators, kernels
        yield FusedGroup(operators, kernels, tuple(places[key]), saved[key])


def _left_groups(fused: Fused, first: int) -> list[LeftGroup]:
    groups: dict[tuple[str, str], list[tuple[int | None, int]]] = {}
    for each in fused.left:
        groups.setdefault((each.operator, each.reason), []).append((each.layer, each.bytes))
    found = [
        LeftGroup(
            operator,
            len(nodes),
            tuple(sorted({first + layer for layer, _ in nodes if layer is not None})),
            sum(size for _, size in nodes),
            reason,
        )
        for (operator, reason), nodes in groups.items()
    ]
    return sorted(found, key=lambda group: -group.bytes)
