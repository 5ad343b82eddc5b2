"""Splitting of a joint graph into forward and backward, given the fraction of activations to save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from gpipe_fast.lower.alias import count_reads, source_of
from gpipe_fast.lower.checkpoint import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    SAVE_ATTENTION,
    SavedFraction,
    check_saved_fraction,
    has_recompute,
)
from gpipe_fast.lower.ladder import Ladder, bytes_of, is_backward, producer_of, read_by_backward
from gpipe_fast.lower.work import is_attention
from gpipe_fast.torch_private.graphs import graph_module
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole, JointGraph, PortNode, dequantized, needed_nodes
from gpipe_fast.trace.tensor_metadata import AnyTensor

# The key in a node's meta for its position in the joint graph, which is autograd's order.
JOINT_POSITION = "gpipe_fast_position"


@dataclass(frozen=True)
class StageGraph:
    """One of the graphs that a stage runs.

    Attributes:
        name: ``forward``, ``forward_saving``, ``backward``, ``backward_recompute`` or ``weights``.
        module: the graph and its constants.
        inputs: the placeholders; several may share a port when parameters are tied.
        outputs: the results.
        parameter_uses: the number of reads of each parameter in the stage's forward.
    """

    name: str
    module: fx.GraphModule
    inputs: tuple[PortNode, ...]
    outputs: tuple[PortNode, ...]
    parameter_uses: Mapping[int, int]


@dataclass(frozen=True)
class SplitGraphs:
    """The graphs of a joint graph under one checkpoint policy.

    Attributes:
        forward: the forward, which also returns the tensors that a micro-batch saves besides the boundary
            inputs.
        backward: computes the gradients from these, boundary inputs and boundary gradients; None in
            inference.
        weights: computes the gradients of parameters, from what ``backward`` reads and from values that it
            returns in addition to the gradients of inputs, the held values; None if ``backward`` computes all
            gradients.
    """

    forward: StageGraph
    backward: StageGraph | None
    weights: StageGraph | None = None


def split(
    joint: JointGraph,
    saved_fraction: SavedFraction,
    *,
    defers_weights: bool = False,
    ladder: Ladder | None = None,
) -> SplitGraphs:
    """Splits a joint graph into forward and backward.

    Args:
        joint: the joint graph of a traced stage.
        saved_fraction: the share of the bytes that 1 saves which may be saved; strictly between 0 and 1, the
            ladder says which values are. Or ``SAVE_ATTENTION``.
        defers_weights: whether gradients of parameters get a graph of their own.
        ladder: a ladder of the graph's template; by default the graph's own.

    Raises:
        ValueError: ``saved_fraction`` is neither within 0 and 1 nor ``SAVE_ATTENTION``.
    """
    check_saved_fraction(saved_fraction)
    results = [n for n in joint.outputs if n.port.role in (GraphRole.OUTPUT, GraphRole.BUFFER)]
    gradients = _gradients(joint)
    arguments = [n for n in joint.inputs if n.port.role is not GraphRole.TANGENT]
    if not gradients:
        return SplitGraphs(_extract(joint, "forward", arguments, results), None)
    kept = _values_to_save(joint, saved_fraction, ladder)
    ports = [PortNode(GraphPort(GraphRole.SAVED, i), node) for i, node in enumerate(kept)]
    name = "backward_recompute" if has_recompute(saved_fraction) else "backward"
    given = [*joint.inputs, *ports]
    forward = _extract(joint, "forward_saving" if kept else "forward", arguments, [*results, *ports])
    of_weights = [n for n in gradients if n.port.role is GraphRole.PARAMETER_GRADIENT]
    if not defers_weights or not of_weights:
        return SplitGraphs(forward, _extract(joint, name, given, gradients))
    of_inputs = [n for n in gradients if n.port.role is GraphRole.INPUT_GRADIENT]
    held = [
        PortNode(GraphPort(GraphRole.HELD, i), node)
        for i, node in enumerate(_values_to_hold(joint, given, of_inputs, of_weights))
    ]
    backward = _extract(joint, name, given, [*of_inputs, *held])
    weights = _extract(joint, "weights", [*given, *held], of_weights)
    return SplitGraphs(forward, backward, weights)


def _gradients(joint: JointGraph) -> list[PortNode]:
    roles = (GraphRole.PARAMETER_GRADIENT, GraphRole.INPUT_GRADIENT)
    return [n for n in joint.outputs if n.port.role in roles]


def _values_to_hold(
    joint: JointGraph,
    inputs: Iterable[PortNode],
    of_inputs: Iterable[PortNode],
    of_weights: Iterable[PortNode],
) -> list[fx.Node]:
    """Returns the values that the gradients of parameters are computed from, as ``_values_to_save``.

    Values that need no boundary gradient are held as well, and not computed again: other kernels might round
    in another way, and a comparison, such as that of ReLU, might then decide differently.
    """
    given = {n.node: n.port for n in inputs}
    before = needed_nodes((n.node for n in of_inputs), given)
    needed = needed_nodes((n.node for n in of_weights), given)
    after_tangents = {node for node, port in given.items() if port.role is GraphRole.TANGENT}
    nodes = [n for n in joint.module.graph.nodes if n in needed and n not in given]
    for node in nodes:
        if after_tangents.isdisjoint(node.all_input_nodes):
            before.add(node)
        else:
            after_tangents.add(node)
    read = {a for n in nodes if n not in before for a in n.all_input_nodes} | {n.node for n in of_weights}
    bases = {source_of(n).base for n in read if n in before}
    bases -= dequantized(joint)
    return [n for n in nodes if n in bases and isinstance(n.meta.get("val"), AnyTensor)]


def _values_to_save(joint: JointGraph, saved_fraction: SavedFraction, ladder: Ladder | None) -> list[fx.Node]:
    """Returns the forward values to save, in graph order; none is a view or a placeholder."""
    if saved_fraction == FULL_RECOMPUTE:
        return []
    nodes = [n for n in joint.module.graph.nodes if n.op == "call_function"]
    if saved_fraction == NO_RECOMPUTE:
        read = read_by_backward(joint)
        return [n for n in nodes if n in read and isinstance(n.meta.get("val"), AnyTensor)]
    if saved_fraction == SAVE_ATTENTION:
        return _attention_results(joint)
    value_of = {n.name: n.meta.get("val") for n in nodes}

    def size(name: str) -> int:
        return bytes_of(value_of[name])

    _, names = (ladder or Ladder.of(joint)).furthest(size, saved_fraction)
    return [n for n in nodes if n.name in names]


def _attention_results(joint: JointGraph) -> list[fx.Node]:
    """Returns the results of fused attention that the backward needs, in graph order."""
    nodes = [n for n in joint.module.graph.nodes if n.op == "call_function" and not is_backward(n)]
    results = [n for n in nodes if isinstance(n.meta.get("val"), AnyTensor) and is_attention(producer_of(n))]
    needed = needed_nodes((n.node for n in _gradients(joint)), {n.node for n in joint.inputs} | {*results})
    return [n for n in results if n in needed]


def _extract(
    joint: JointGraph, name: str, inputs: Iterable[PortNode], outputs: Iterable[PortNode]
) -> StageGraph:
    """Extracts the part of the joint graph that computes ``outputs`` from ``inputs``.

    A weight is dequantized for each of its uses, just before it: else all of a stage's would be in memory.
    """
    inputs, outputs = list(inputs), list(outputs)
    given = {n.node: n.port for n in inputs}
    needed = needed_nodes((n.node for n in outputs), given)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node, port in given.items():
        if node in needed:
            copies[node] = graph.placeholder(f"{port.role.value}_{port.index}_{node.name}")
            copies[node].meta = node.meta
    own = {n: i for i, n in enumerate(joint.module.graph.nodes) if n in needed and n not in copies}
    again = dequantized(joint) - given.keys()

    def copy_node(node: fx.Node) -> fx.Node:
        weights = {a: copy_node(a) for a in node.all_input_nodes if a in again}
        copy = graph.node_copy(node, lambda argument: weights.get(argument) or copies[argument])
        copy.meta[JOINT_POSITION] = own[node]
        return copy

    for node in _order_by_part((n for n in own if n not in again), joint):
        copies[node] = copy_node(node)
    copies |= {n.node: copy_node(n.node) for n in outputs if n.node in again}
    graph.output(tuple(copies[n.node] for n in outputs))
    return StageGraph(
        name,
        graph_module(joint.module, graph),
        tuple(PortNode(port, copies[node]) for node, port in given.items() if node in copies),
        tuple(PortNode(n.port, copies[n.node]) for n in outputs),
        parameter_uses(joint),
    )


def _order_by_part(nodes: Iterable[fx.Node], joint: JointGraph) -> list[fx.Node]:
    """Orders nodes into three parts, and keeps the order within each part.

    First come the nodes that need no boundary gradient, since they can run before one arrives; then the
    nodes that lead to the gradients of the stage's inputs, since the previous stage waits for them; then the
    rest.
    """
    given = {n.node: n.port for n in joint.inputs}
    early = needed_nodes((n.node for n in joint.outputs if n.port.role is GraphRole.INPUT_GRADIENT), given)
    after_tangents = {node for node, port in given.items() if port.role is GraphRole.TANGENT}
    parts: tuple[list[fx.Node], ...] = ([], [], [])
    for node in nodes:
        if after_tangents.isdisjoint(node.all_input_nodes):
            parts[0].append(node)
        else:
            after_tangents.add(node)
            parts[1 if node in early else 2].append(node)
    return [node for part in parts for node in part]


def parameter_uses(joint: JointGraph) -> Mapping[int, int]:
    """Returns the number of reads of each parameter in the stage's forward."""
    if joint.parameter_uses is not None:
        return joint.parameter_uses
    uses: Counter[int] = Counter()
    for port, node in joint.inputs:
        if port.role is GraphRole.PARAMETER:
            uses[port.index] += sum(count_reads(user, node) for user in node.users if not is_backward(user))
    return dict(uses)
