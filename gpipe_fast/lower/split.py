"""Partitioning of a joint graph into forward and backward, given the fraction of activations to save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from gpipe_fast.lower.alias import count_reads, source_of
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE, NO_RECOMPUTE, Share, check_share
from gpipe_fast.trace import aot
from gpipe_fast.trace.trace import Joint, Node, Port, Role

# The key in a node's meta for its position in the joint graph, which is autograd's order.
JOINT_POSITION = "gpipe_fast_position"


@dataclass(frozen=True)
class StageGraph:
    """One of the graphs a stage runs.

    Attributes:
        name: ``forward``, ``forward_saving``, ``backward`` or ``backward_recompute``.
        module: the graph and its constants.
        inputs: the placeholders; several may share a port when parameters are tied.
        outputs: the results.
        parameter_uses: the number of reads of each parameter in the stage's forward.
    """

    name: str
    module: fx.GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    parameter_uses: Mapping[int, int]


@dataclass(frozen=True)
class Saved:
    """One tensor that the forward saves for the backward.

    Attributes:
        name: the value's name in the joint graph.
        shape: in elements.
        dtype: the dtype of the elements.
        bytes: the size in bytes.
        layer: the layer that computed the tensor, as an index within the stage, or None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    layer: int | None


@dataclass(frozen=True)
class Split:
    """The graphs of a joint graph under one checkpoint policy.

    Attributes:
        forward: the forward that saves nothing.
        forward_saving: the forward that also returns ``saved``; the same object as ``forward`` if nothing is
            saved.
        backward: computes the gradients from ``saved``, boundary inputs and boundary gradients; None in
            inference.
        saved: the tensors saved per micro-batch, besides the boundary inputs.
    """

    forward: StageGraph
    forward_saving: StageGraph
    backward: StageGraph | None
    saved: tuple[Saved, ...]


def split(joint: Joint, share: Share) -> Split:
    """Cuts a joint graph into forward and backward.

    Args:
        joint: the joint graph of a traced stage.
        share: the fraction of activations to save; strictly between 0 and 1, PyTorch's min-cut partitioner
            chooses the activations (``activation_memory_budget``).

    Raises:
        ValueError: ``share`` is not within 0 and 1.
    """
    check_share(share)
    results = [n for n in joint.outputs if n.port.role in (Role.OUTPUT, Role.BUFFER)]
    gradients = [n for n in joint.outputs if n.port.role in (Role.PARAMETER_GRADIENT, Role.INPUT_GRADIENT)]
    arguments = [n for n in joint.inputs if n.port.role is not Role.TANGENT]
    forward = _extract(joint, "forward", arguments, results)
    if not gradients:
        return Split(forward, forward, None, ())
    kept = _choose(joint, len(results), share)
    ports = [Node(Port(Role.SAVED, i), node) for i, node in enumerate(kept)]
    name = "backward" if kept or share > FULL_RECOMPUTE else "backward_recompute"
    backward = _extract(joint, name, [*joint.inputs, *ports], gradients)
    saving = _extract(joint, "forward_saving", arguments, [*results, *ports]) if kept else forward
    return Split(forward, saving, backward, tuple(_describe(node) for node in kept))


def _choose(joint: Joint, num_results: int, share: Share) -> list[fx.Node]:
    """Returns the forward values to save, in graph order; none is a view or a placeholder."""
    if share == FULL_RECOMPUTE:
        return []
    nodes = [n for n in joint.module.graph.nodes if n.op == "call_function"]
    if share == NO_RECOMPUTE:
        read = {a for n in nodes if _is_backward(n) for a in n.all_input_nodes if not _is_backward(a)}
    else:
        names = aot.min_cut_saved(joint.module, num_results, share)
        read = {n for n in nodes if n.name in names}
    # Recomputing a view is free, so only the view's base is saved.
    bases = {source_of(n).base for n in read}
    return [n for n in nodes if n in bases and isinstance(n.meta.get("val"), Tensor)]


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def _describe(node: fx.Node) -> Saved:
    value = node.meta["val"]
    layer = (node.meta.get("custom") or {}).get("layer")
    return Saved(node.name, tuple(value.shape), value.dtype, value.numel() * value.element_size(), layer)


def _extract(joint: Joint, name: str, inputs: Iterable[Node], outputs: Iterable[Node]) -> StageGraph:
    """Extracts the part of the joint graph that computes ``outputs`` from ``inputs``."""
    inputs, outputs = list(inputs), list(outputs)
    given = {n.node: n.port for n in inputs}
    needed = _needed(given, (n.node for n in outputs))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node, port in given.items():
        if node in needed:
            copies[node] = graph.placeholder(f"{port.role.value}_{port.index}_{node.name}")
            copies[node].meta = node.meta
    own = {n: i for i, n in enumerate(joint.module.graph.nodes) if n in needed and n not in copies}
    for node in _in_parts(own, joint):
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta[JOINT_POSITION] = own[node]
    graph.output(tuple(copies[n.node] for n in outputs))
    return StageGraph(
        name,
        aot.graph_module(joint.module, graph),
        tuple(Node(port, copies[node]) for node, port in given.items() if node in copies),
        tuple(Node(n.port, copies[n.node]) for n in outputs),
        _parameter_uses(joint),
    )


def _in_parts(nodes: Iterable[fx.Node], joint: Joint) -> list[fx.Node]:
    """Orders nodes into three parts, and keeps the order within each part.

    First come the nodes that need no boundary gradient, since they can run before one arrives; then the
    nodes that lead to the gradients of the stage's inputs, since the previous stage waits for them; then the
    rest.
    """
    given = {n.node: n.port for n in joint.inputs}
    early = _needed(given, (n.node for n in joint.outputs if n.port.role is Role.INPUT_GRADIENT))
    late = {node for node, port in given.items() if port.role is Role.TANGENT}
    parts: tuple[list[fx.Node], ...] = ([], [], [])
    for node in nodes:
        if late.isdisjoint(node.all_input_nodes):
            parts[0].append(node)
        else:
            late.add(node)
            parts[1 if node in early else 2].append(node)
    return [node for part in parts for node in part]


def _parameter_uses(joint: Joint) -> dict[int, int]:
    uses: Counter[int] = Counter()
    for port, node in joint.inputs:
        if port.role is Role.PARAMETER:
            uses[port.index] += sum(count_reads(user, node) for user in node.users if not _is_backward(user))
    return dict(uses)


def _needed(given: Mapping[fx.Node, Port], results: Iterable[fx.Node]) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    pending = list(results)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            if node not in given:
                pending.extend(node.all_input_nodes)
    return needed


__all__ = ["JOINT_POSITION", "Saved", "Split", "StageGraph", "split"]
