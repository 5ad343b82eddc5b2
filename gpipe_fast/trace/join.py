"""Joins the joint graphs of consecutive runs of layers to the joint graph of all their layers.

The forward graphs follow each other in order, the backward graphs in reverse order::

    part 0      forward 0 ─▶ activation ─▶ forward 1         part 1
    gradients ◀─ backward 0 ◀─ gradient ◀─ backward 1 ◀─ tangents

The result equals the graph of a trace of all layers at once, operator by operator, because autograd runs the
backward in this order, too: it adds the gradients of a tensor up in the reverse order of the tensor's uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from gpipe_fast.torch_private.graphs import graph_module
from gpipe_fast.torch_private.operators import OpOverload
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole, JointGraph, PortNode, copy_node, needed_nodes

_KEYED_LAYER = 1  # the position of the layer among the arguments of a keyed random operator


class _Part:
    """One of the graphs to join, and the copies of its nodes."""

    def __init__(self, joint: JointGraph, first_layer: int, num_parameters: int, num_buffers: int) -> None:
        self.joint = joint
        self.copies: dict[fx.Node, fx.Node] = {}
        self._first_layer = first_layer
        self._offsets = {
            GraphRole.PARAMETER: num_parameters,
            GraphRole.PARAMETER_GRADIENT: num_parameters,
            GraphRole.BUFFER: num_buffers,
        }
        self._needed = needed_nodes(node for _, node in joint.outputs)

    def port(self, port: GraphPort) -> GraphPort:
        """Returns a port with its index in the joined graph."""
        return replace(port, index=port.index + self._offsets.get(port.role, 0))

    def inputs(self, *roles: GraphRole) -> list[PortNode]:
        """Returns the placeholders with these roles."""
        return [n for n in self.joint.inputs if n.port.role in roles]

    def outputs(self, *roles: GraphRole) -> list[PortNode]:
        """Returns the results with these roles, as nodes of the joined graph."""
        return [
            PortNode(self.port(port), self.copies[node])
            for port, node in self.joint.outputs
            if port.role in roles
        ]

    def copy_nodes(self, graph: fx.Graph, root: nn.Module, is_backward: bool) -> None:
        """Copies the operators of the forward or of the backward, and the constants that they use."""
        for node in self.joint.module.graph.nodes:
            if node.op in ("placeholder", "output") or node not in self._needed:
                continue
            if (node.meta.get("partitioner_tag") == "is_backward") is not is_backward:
                continue
            copy = self.copies[node] = copy_node(node, graph, self.copies)
            custom = copy.meta.get("custom") or {}
            if "layer" in custom:
                copy.meta["custom"] = {**custom, "layer": self.layer(custom["layer"])}
            if node.op == "get_attr":
                name = f"layer{self._first_layer}_{node.target}"
                setattr(root, name, getattr(self.joint.module, str(node.target)))
                copy.target = name
            elif _is_keyed(node):
                args = list(copy.args)
                args[_KEYED_LAYER] = self.layer(args[_KEYED_LAYER])
                copy.args = tuple(args)

    def layer(self, layer: Any) -> int:
        """Returns the number of one of the part's layers in the joined graph."""
        return int(layer) + self._first_layer


def join(joints: Sequence[JointGraph], num_tensors: Sequence[tuple[int, int]]) -> JointGraph:
    """Joins graphs to one.

    Args:
        joints: the graph of each part. The outputs of each are the inputs of the next, whose gradients arrive
            in the layouts that the next part produces. No two parts share a parameter or buffer. The last
            part may have more inputs, which need no gradient: skip tensors that the joined graph gets.
        num_tensors: the number of parameters and of buffers of each part.
    """
    parts: list[_Part] = []
    layers = parameters = buffers = 0
    for joint, (own_parameters, own_buffers) in zip(joints, num_tensors, strict=True):
        parts.append(_Part(joint, layers, parameters, buffers))
        layers, parameters, buffers = (
            layers + joint.num_layers,
            parameters + own_parameters,
            buffers + own_buffers,
        )
    graph, root = fx.Graph(), nn.Module()
    inputs = _placeholders(graph, parts)
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        part.copy_nodes(graph, root, is_backward=False)
        if following is not None:
            activations = _by_index(part.outputs(GraphRole.OUTPUT))
            for port, node in following.inputs(GraphRole.INPUT):
                if port.index in activations:  # else a skip tensor, which has a placeholder
                    following.copies[node] = activations[port.index]
    for before, part in reversed(list(zip([None, *parts[:-1]], parts, strict=True))):
        part.copy_nodes(graph, root, is_backward=True)
        if before is not None:
            gradients = _by_index(part.outputs(GraphRole.INPUT_GRADIENT))
            for port, node in before.inputs(GraphRole.TANGENT):
                before.copies[node] = gradients[port.index]
    outputs = [
        *(n for part in parts for n in part.outputs(GraphRole.BUFFER)),
        *parts[-1].outputs(GraphRole.OUTPUT),
        *(n for part in parts for n in part.outputs(GraphRole.PARAMETER_GRADIENT)),
        *parts[0].outputs(GraphRole.INPUT_GRADIENT),
    ]
    graph.output(tuple(n.node for n in outputs))
    return JointGraph(
        graph_module(root, graph),
        tuple(inputs),
        tuple(outputs),
        layers,
        joints[-1].structure,
        joints[-1].stashed,
        joints[0].written_inputs,
        tuple(
            part.layer(layer)
            for part, joint in zip(parts, joints, strict=True)
            for layer in joint.unfused_layers
        ),
    )


def _placeholders(graph: fx.Graph, parts: Sequence[_Part]) -> list[PortNode]:
    """Makes the placeholders: parameters and buffers of all parts, key, inputs and tangents."""
    found: list[PortNode] = []
    key: fx.Node | None = None

    def add(part: _Part, port: GraphPort, node: fx.Node, prefix: str) -> fx.Node:
        copy = part.copies[node] = graph.placeholder(f"{prefix}_{len(found) + 1}")
        copy.meta = node.meta
        found.append(PortNode(part.port(port), copy))
        return copy

    for role in (GraphRole.PARAMETER, GraphRole.BUFFER):
        for part in parts:
            for port, node in part.inputs(role):
                add(part, port, node, "primals")
    for part in parts:
        for port, node in part.inputs(GraphRole.KEY):
            if key is None:
                key = add(part, port, node, "primals")
            part.copies[node] = key
    inputs = parts[0].inputs(GraphRole.INPUT)
    for port, node in inputs:
        add(parts[0], port, node, "primals")
    if len(parts) > 1:
        num_activations = len(parts[-2].joint.of(GraphRole.OUTPUT))
        for port, node in parts[-1].inputs(GraphRole.INPUT):
            if port.index >= num_activations:
                index = len(inputs) + port.index - num_activations
                add(parts[-1], replace(port, index=index), node, "primals")
    for port, node in parts[-1].inputs(GraphRole.TANGENT):
        add(parts[-1], port, node, "tangents")
    return found


def _by_index(nodes: Sequence[PortNode]) -> Mapping[int, fx.Node]:
    return {port.index: node for port, node in nodes}


def _is_keyed(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and str(node.target).startswith("gpipe_fast.keyed_")
