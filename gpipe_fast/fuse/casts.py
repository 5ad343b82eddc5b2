"""Casts of parameters, which autocast makes anew at every use, moved out of a graph.

All micro-batches read the same parameters, so a stage casts them once per forward and once per backward
(csrc/program/parameter_casts.h), and the graph gets the casts as placeholders::

    before                                 after
    w_bf16 = _to_copy(w, bfloat16)         addmm = addmm(b, x, t(w_bf16))
    addmm = addmm(b, x, t(w_bf16))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import starmap

import torch
from torch import fx

from gpipe_fast.lower.gradients import is_dense
from gpipe_fast.lower.split import parameter_uses
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole, JointGraph, PortNode, copy_node

aten = torch.ops.aten


def hoist_parameter_casts(joint: JointGraph) -> JointGraph:
    """Replaces casts of parameters by placeholders with the role ``PARAMETER_CAST``.

    The placeholder is the parameter in the cast's dtype, with the parameter's sizes and strides. A cast of a
    view of a parameter stays in the graph.

    Call it before the graph is split: a placeholder is not saved for the backward, a cast would be.

    Args:
        joint: the joint graph of a traced stage.

    Returns:
        The graph with placeholders; ``joint`` itself if there is nothing to replace.
    """
    casts = _casts(joint)
    if not casts:
        return joint
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    placeholders: dict[GraphPort, fx.Node] = {}
    for node in joint.module.graph.nodes:
        if node.op != "placeholder" and not placeholders:
            placeholders = _add_placeholders(graph, casts)
        port = casts.get(node)
        copies[node] = copy_node(node, graph, copies) if port is None else placeholders[port]
    found = joint.with_graph(graph, copies)
    inputs = (*found.inputs, *starmap(PortNode, placeholders.items()))
    return replace(found, inputs=inputs, parameter_uses=parameter_uses(joint))


def _casts(joint: JointGraph) -> dict[fx.Node, GraphPort]:
    """Returns the casts of parameters, and the port of each."""
    parameters = {node: port.index for port, node in joint.inputs if port.role is GraphRole.PARAMETER}
    return {
        node: GraphPort(GraphRole.PARAMETER_CAST, parameters[node.all_input_nodes[0]], node.meta["val"].dtype)
        for node in joint.module.graph.nodes
        if node.target is aten._to_copy.default
        and node.all_input_nodes[0] in parameters
        and _keeps_layout(node)
    }


def _keeps_layout(node: fx.Node) -> bool:
    """Returns whether a cast changes the dtype alone, from one floating-point type to another."""
    value, whole = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return (
        value.dtype.is_floating_point
        and whole.dtype.is_floating_point
        and value.dtype != whole.dtype
        and value.device == whole.device
        and value.layout is torch.strided
        and value.stride() == whole.stride()
        and is_dense(whole)
    )


def _add_placeholders(graph: fx.Graph, casts: Mapping[fx.Node, GraphPort]) -> dict[GraphPort, fx.Node]:
    """Adds a placeholder for each parameter and dtype."""
    placeholders: dict[GraphPort, fx.Node] = {}
    for cast, port in casts.items():
        if port not in placeholders:
            (parameter,), dtype = cast.all_input_nodes, cast.meta["val"].dtype
            whole = parameter.meta["val"]
            node = graph.placeholder(f"{parameter.name}_{str(dtype).removeprefix('torch.')}")
            node.meta["val"] = whole.new_empty_strided(whole.shape, whole.stride(), dtype=dtype)
            placeholders[port] = node
    return placeholders
