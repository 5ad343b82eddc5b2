"""Casts of parameters, which autocast makes anew at every use, moved out of a graph.

All micro-batches read the same parameters, so a stage casts them once per forward and once per backward
(csrc/program/parameter_casts.h), and the graph gets the casts as placeholders::

    before                                 after
    w_bf16 = _to_copy(w, bfloat16)         addmm = addmm(b, x, t(w_bf16))
    addmm = addmm(b, x, t(w_bf16))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from gpipe_fast.lower.alias import Source, source_of
from gpipe_fast.lower.gradients import is_dense
from gpipe_fast.lower.split import parameter_uses
from gpipe_fast.torch_private.graphs import graph_module
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole, JointGraph, PortNode, copy_node

aten = torch.ops.aten


@dataclass(frozen=True)
class _Cast:
    """A cast of a parameter, or of a view of one; ``source`` says which part of the parameter it reads."""

    node: fx.Node
    source: Source
    port: GraphPort

    @property
    def value(self) -> Tensor:
        value: Tensor = self.node.meta["val"]
        return value

    @property
    def parameter(self) -> Tensor:
        value: Tensor = self.source.base.meta["val"]
        return value

    @property
    def part(self) -> tuple[int, torch.Size]:
        return self.source.offset, self.value.shape


def hoist_parameter_casts(joint: JointGraph) -> JointGraph:
    """Replaces casts of parameters by placeholders with the role ``PARAMETER_CAST``.

    The placeholder is the whole parameter in the cast's dtype, with the parameter's sizes and strides, and a
    cast of a view becomes a view of the placeholder. A cast of a part of a parameter stays in the graph
    unless the graph casts as many elements of the parameter as it has.

    Call it before the graph is split: a placeholder is not saved for the backward, a cast would be.

    Args:
        joint: the joint graph of a traced stage.

    Returns:
        The graph with placeholders; ``joint`` itself if there is nothing to replace.
    """
    casts = _worthwhile(_casts(joint))
    if not casts:
        return joint
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    placeholders: dict[GraphPort, fx.Node] = {}
    for node in joint.module.graph.nodes:
        if node.op != "placeholder" and not placeholders:
            placeholders = _add_placeholders(graph, casts.values())
        cast = casts.get(node)
        if cast is None:
            copies[node] = copy_node(node, graph, copies)
        else:
            copies[node] = _view_of(placeholders[cast.port], cast)
    return replace(
        joint,
        module=graph_module(joint.module, graph),
        inputs=(
            *(PortNode(port, copies[node]) for port, node in joint.inputs),
            *(PortNode(port, node) for port, node in placeholders.items()),
        ),
        outputs=tuple(PortNode(port, copies[node]) for port, node in joint.outputs),
        parameter_uses=parameter_uses(joint),
    )


def _casts(joint: JointGraph) -> list[_Cast]:
    """Returns the casts of parameters that a view of the whole parameter's cast can replace."""
    parameters = {node: port.index for port, node in joint.inputs if port.role is GraphRole.PARAMETER}
    casts = []
    for node in joint.module.graph.nodes:
        if node.target is aten._to_copy.default:
            source = source_of(node.all_input_nodes[0])
            if source.base in parameters and _keeps_layout(node, source):
                dtype = node.meta["val"].dtype
                port = GraphPort(GraphRole.PARAMETER_CAST, parameters[source.base], dtype)
                casts.append(_Cast(node, source, port))
    return casts


def _keeps_layout(node: fx.Node, source: Source) -> bool:
    """Returns whether a cast changes the dtype alone, from one floating-point type to another."""
    value, viewed, whole = (n.meta["val"] for n in (node, node.all_input_nodes[0], source.base))
    return (
        value.dtype.is_floating_point
        and whole.dtype.is_floating_point
        and value.dtype != whole.dtype
        and value.device == whole.device
        and value.layout is torch.strided
        and value.stride() == viewed.stride()
        and is_dense(whole)
    )


def _worthwhile(casts: Iterable[_Cast]) -> dict[fx.Node, _Cast]:
    """Returns, by node, the casts that read as many elements of their parameter as it has, or more."""
    by_port: dict[GraphPort, list[_Cast]] = {}
    for cast in casts:
        by_port.setdefault(cast.port, []).append(cast)
    found: dict[fx.Node, _Cast] = {}
    for same in by_port.values():
        parts = {cast.part: cast.value.numel() for cast in same}
        if sum(parts.values()) >= same[0].parameter.numel():
            found |= {cast.node: cast for cast in same}
    return found


def _add_placeholders(graph: fx.Graph, casts: Iterable[_Cast]) -> dict[GraphPort, fx.Node]:
    """Adds a placeholder for each parameter and dtype."""
    placeholders: dict[GraphPort, fx.Node] = {}
    for cast in casts:
        if cast.port not in placeholders:
            whole = cast.parameter
            dtype = cast.value.dtype
            node = graph.placeholder(f"{cast.source.base.name}_{str(dtype).removeprefix('torch.')}")
            node.meta["val"] = whole.new_empty_strided(whole.shape, whole.stride(), dtype=dtype)
            placeholders[cast.port] = node
    return placeholders


def _view_of(placeholder: fx.Node, cast: _Cast) -> fx.Node:
    """Returns the part of a placeholder that replaces a cast: the placeholder itself, or a view of it."""
    whole, value = placeholder.meta["val"], cast.value
    if (cast.source.offset, value.shape, value.stride()) == (0, whole.shape, whole.stride()):
        return placeholder
    arguments = (placeholder, list(value.shape), list(value.stride()), cast.source.offset)
    node = placeholder.graph.call_function(aten.as_strided.default, arguments)
    node.meta = {**cast.node.meta, "val": aten.as_strided.default(whole, *arguments[1:])}
    return node


__all__ = ["hoist_parameter_casts"]
