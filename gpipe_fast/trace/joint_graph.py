"""Joint graphs: the traced forward and backward of a stage as one graph, with ports."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from gpipe_fast.layers.quantized import parts_of
from gpipe_fast.layers.structure import ONE_TENSOR, Structure
from gpipe_fast.torch_private import pytree
from gpipe_fast.torch_private.graphs import graph_module
from gpipe_fast.torch_private.operators import OpOverload, is_view_op
from gpipe_fast.trace.gradient_layouts import ArrivingLayouts, GradientLayout, GradientLayouts
from gpipe_fast.trace.tensor_metadata import AnyTensor

# The key in the meta of a placeholder that is a quantized parameter, or part of one.
IS_QUANTIZED = "gpipe_fast_is_quantized"


class GraphRole(str, Enum):
    """The role of a tensor that enters or leaves a stage's graph."""

    PARAMETER = "parameter"
    PARAMETER_CAST = "parameter_cast"
    BUFFER = "buffer"
    KEY = "key"
    INPUT = "input"
    OUTPUT = "output"
    SAVED = "saved"
    HELD = "held"
    TANGENT = "tangent"
    PARAMETER_GRADIENT = "parameter_gradient"
    INPUT_GRADIENT = "input_gradient"


@dataclass(frozen=True)
class GraphPort:
    """One placeholder or result of a graph.

    Attributes:
        role: what it is to the stage.
        index: its index among the tensors with that role; for a cast of a parameter, the parameter's index.
        cast_to: the dtype of a cast of a parameter; else None.
        keeps_version: whether the operator that writes a buffer leaves its version as it is, as batch norm.
        placements: how the gradient of a sharded parameter is placed; else None.
    """

    role: GraphRole
    index: int
    cast_to: torch.dtype | None = None
    keeps_version: bool = False
    placements: tuple[Any, ...] | None = None

    def __str__(self) -> str:
        cast = "" if self.cast_to is None else f" to {str(self.cast_to).removeprefix('torch.')}"
        return f"{self.role.value}[{self.index}]{cast}"


class PortNode(NamedTuple):
    """A port and its graph node."""

    port: GraphPort
    node: fx.Node


@dataclass(frozen=True)
class JointGraph:
    """The traced forward and backward of one stage.

    Attributes:
        module: the functional graph, and the constants that it refers to.
        inputs: every placeholder, in graph order. Tied parameters and buffers count once.
        outputs: forward results, new values of written buffers, gradients. Absent gradients are left out.
        num_layers: the number of traced layers; ``node.meta['custom']['layer']`` counts them from 0.
        structure: the nesting of the last layer's outputs.
        stashed: for each stashed skip connection, whether it carries a tensor (else None). Stashed tensors
            are graph outputs, after the last layer's outputs.
        written_inputs: the inputs that layers change in place; in the graph they change copies.
        unfused_layers: indices of layers whose attention with dropout runs without a fused kernel on a GPU.
        parameter_uses: the number of reads of each parameter in the layers' forward, if the graph no longer
            shows them because casts of parameters were hoisted; else None.
        derived: what other packages derive from the graph, by its type.
    """

    module: fx.GraphModule
    inputs: tuple[PortNode, ...]
    outputs: tuple[PortNode, ...]
    num_layers: int
    structure: Structure = ONE_TENSOR
    stashed: tuple[bool, ...] = ()
    written_inputs: tuple[int, ...] = ()
    unfused_layers: tuple[int, ...] = ()
    parameter_uses: Mapping[int, int] | None = None
    derived: dict[type, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of(self, role: GraphRole) -> dict[int, fx.Node]:
        """Returns the result nodes with this role by index, or the placeholders if no result has it."""
        found = {n.port.index: n.node for n in self.outputs if n.port.role is role}
        return found or {n.port.index: n.node for n in self.inputs if n.port.role is role}

    def with_graph(self, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> JointGraph:
        """Returns the joint graph with another graph, given the copies of its placeholders and results."""
        inputs, outputs = (
            tuple(PortNode(port, copies[node]) for port, node in nodes)
            for nodes in (self.inputs, self.outputs)
        )
        return replace(self, module=graph_module(self.module, graph), inputs=inputs, outputs=outputs)

    @property
    def ports(self) -> TracedPorts:
        """The ports; not kept, since they refer to the graph."""
        inputs, outputs = (
            tuple(PortTensor(n.port, n.node.meta.get("val")) for n in nodes)
            for nodes in (self.inputs, self.outputs)
        )
        return TracedPorts(self, inputs, outputs)


class PortTensor(NamedTuple):
    """A port and its tensor's metadata; None for a port of which only the role and the index are needed."""

    port: GraphPort
    tensor: AnyTensor | None


@dataclass(frozen=True)
class TracedPorts:
    """The ports of a joint graph, with the metadata of their tensors: what others need to know of it.

    Attributes:
        joint: the graph; the template's, if they are those of an instance.
        inputs: every placeholder, in graph order.
        outputs: forward results, new values of written buffers, gradients.
    """

    joint: JointGraph
    inputs: tuple[PortTensor, ...]
    outputs: tuple[PortTensor, ...]

    @property
    def draws(self) -> bool:
        """Whether any operator draws random numbers."""
        return any(n.port.role is GraphRole.KEY and bool(n.node.users) for n in self.joint.inputs)

    def of(self, role: GraphRole) -> dict[int, AnyTensor]:
        """Returns the results with this role by index, or the placeholders if no result has it."""
        for ports in (self.outputs, self.inputs):
            found = {port.index: tensor for port, tensor in ports if port.role is role}
            if found:
                return {index: tensor for index, tensor in found.items() if tensor is not None}
        return {}

    def input_gradient_layouts(self) -> ArrivingLayouts:
        """Returns the layouts of the gradients of the inputs, by input."""
        return {i: GradientLayout.of(tensor) for i, tensor in self.of(GraphRole.INPUT_GRADIENT).items()}

    def gradient_layouts(self, gradients: ArrivingLayouts) -> GradientLayouts:
        """Returns the outputs whose gradients differ in layout from the output, or do not arrive.

        Args:
            gradients: the layouts of the gradients that arrive, by output.
        """
        # Strides of size-one dimensions are compared, too: they distinguish channels_last from contiguous.
        return tuple(
            (index, gradients.get(index))
            for index, tangent in self.of(GraphRole.TANGENT).items()
            if gradients.get(index) != GradientLayout.of(tangent)
        )

    def differentiable_outputs(self) -> frozenset[int]:
        """Returns the indices of the outputs that take a gradient."""
        return frozenset(port.index for port, _ in self.inputs if port.role is GraphRole.TANGENT)


def dequantized(joint: JointGraph) -> set[fx.Node]:
    """Returns the operators that need nothing but quantized weights, and constants.

    Their results are as large as weights without quantization, and the same for all micro-batches: they are
    neither saved, nor computed long before they are used.
    """
    found: set[fx.Node] = set()
    weights = {n.node for n in joint.inputs if n.node.meta.get(IS_QUANTIZED)}
    if not weights:
        return found
    constant: set[fx.Node] = set()
    for node in joint.module.graph.nodes:
        if node.op == "placeholder":
            continue
        needed = node.all_input_nodes
        if constant.issuperset(needed):
            constant.add(node)
        elif all(each in weights or each in found or each in constant for each in needed):
            found.add(node)
    return found


def parameters_of(layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Returns the parameters of a stage in the order of their ports, tied parameters once."""
    return list({id(p): p for layer in layers for p in layer.parameters()}.values())


def buffers_of(layers: Iterable[nn.Module]) -> list[Tensor]:
    """Returns the buffers of a stage in the order of their ports, tied buffers once.

    After those of each layer come the tensors inside of its quantized parameters, which programs only read:
    one that several parameters share, as a table of codes, once for each.
    """
    return list(named_buffers_of(layers).values())


def named_buffers_of(layers: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Returns the tensors of `buffers_of` by name."""
    found: dict[str, Tensor] = {}
    known: set[int] = set()
    for index, layer in enumerate(layers):
        for name, buffer in layer.named_buffers():
            if id(buffer) not in known:
                known.add(id(buffer))
                found[f"{index}.{name}"] = buffer
        for name, parameter in layer.named_parameters():
            if type(parameter) is not nn.Parameter and id(parameter) not in known:
                known.add(id(parameter))
                found.update((f"{index}.{name}{path}", part) for path, part in parts_of(parameter).items())
    return found


def needed_nodes(results: Iterable[fx.Node], given: Container[fx.Node] = ()) -> set[fx.Node]:
    """Returns the results and the nodes that they depend on, up to the given nodes and with these."""
    needed: set[fx.Node] = set()
    pending = list(results)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            if node not in given:
                pending.extend(node.all_input_nodes)
    return needed


def copy_node(node: fx.Node, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Copies a node to another graph, given the copies of its arguments.

    The example value of a view is computed again if what it views now starts elsewhere in memory: offsets of
    views are found from example values (gpipe_fast/lower/alias.py), which all have to be of one graph.
    """
    copy = graph.node_copy(node, copies.__getitem__)
    target: Any = node.target
    is_view = target is operator.getitem or (isinstance(target, OpOverload) and is_view_op(target))
    viewed = node.all_input_nodes  # none of a constant
    if is_view and viewed and _is_moved(viewed[0], copies):
        args, kwargs = fx.map_arg((copy.args, copy.kwargs), lambda n: n.meta["val"])
        copy.meta["val"] = target(*args, **kwargs)
    return copy


def _is_moved(node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> bool:
    """Returns whether the example values of a node's copy start elsewhere in memory than the node's."""
    before, after = (pytree.tree_leaves(n.meta.get("val")) for n in (node, copies[node]))
    return any(
        isinstance(a, Tensor) and a.storage_offset() != b.storage_offset()
        for a, b in zip(before, after, strict=True)
    )
