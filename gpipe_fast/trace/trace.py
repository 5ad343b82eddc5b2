"""Traces a stage for one signature to a joint graph, or returns the reason why the stage is untraceable."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from gpipe_fast.devices import devices_differ, made_current
from gpipe_fast.layers.batchnorm import deferring
from gpipe_fast.layers.quantized import is_quantized, parts_of, stand_in
from gpipe_fast.layers.sharded import is_gathered, is_sharded
from gpipe_fast.layers.structure import ONE_TENSOR, Structure, tuple_structure
from gpipe_fast.randomness.random import UnkeyedRandomOp
from gpipe_fast.strides import bits_of, empty_like, with_bits
from gpipe_fast.torch_private import aot, fake_tensors
from gpipe_fast.torch_private.modes import disable_current_modes
from gpipe_fast.trace.absent_device import backward_without_gpu, choose_attention
from gpipe_fast.trace.capture_layers import capture_layers, tensors_restored
from gpipe_fast.trace.dynamo import Captured, Refused
from gpipe_fast.trace.garbage import collector_paused
from gpipe_fast.trace.gradient_layouts import GradientLayouts, remove_arrive
from gpipe_fast.trace.interrupts import interrupts_deferred
from gpipe_fast.trace.joint_export import PLACEMENTS, export_joint
from gpipe_fast.trace.joint_graph import (
    IS_QUANTIZED,
    GraphPort,
    GraphRole,
    JointGraph,
    PortNode,
    buffers_of,
    parameters_of,
)
from gpipe_fast.trace.layer_states import describe
from gpipe_fast.trace.layers_function import (
    InputMutated,
    LayersFunction,
    TraceContext,
    attribute_parts,
    skips_from,
)
from gpipe_fast.trace.symbols import TraceMode
from gpipe_fast.trace.traceability import (
    Untraceable,
    check_constants,
    check_graph,
    check_layers,
    warn_of_autocast,
)
from gpipe_fast.trace.triton_calls import default_arguments_known, read_triton_calls

# No skip connections, no deferred batch norm.
_NO_CONTEXT = TraceContext()


@collector_paused()
def trace(
    layers: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    gradient_layouts: GradientLayouts = (),
    input_structure: Structure | None = None,
    trace_context: TraceContext = _NO_CONTEXT,
    mode: TraceMode | None = None,
    copy_inputs: bool = False,
) -> JointGraph:
    """Traces one stage for inputs with the given shapes, dtypes, strides and ``requires_grad``.

    With gradients enabled the graph contains forward and backward. Under ``no_grad`` it contains the forward
    alone; this needs a trace of its own, because some layers then run other code.

    Args:
        layers: the stage's layers.
        inputs: one micro-batch of the stage's input: fake tensors of ``mode``; or real tensors, of which only
            shapes, dtypes, strides and ``requires_grad`` are used.
        gradient_layouts: outputs whose gradient arrives in another layout than the output's, or never.
        input_structure: the nesting of the inputs in the first layer's argument; by default the argument is
            one tensor, or a tuple of several.
        trace_context: skip connections, batch norm mode and device of the layers.
        mode: the fake mode; by default a new one.
        copy_inputs: whether the graph copies its inputs; it does so anyway if a layer changes them in place.

    Returns:
        The graph.

    Raises:
        Untraceable: the stage cannot be traced faithfully.
    """
    if mode is None:
        mode, device = TraceMode(trace_context.is_absent), trace_context.device
        inputs = [mode.empty(x, device or x.device, x.requires_grad) for x in inputs]
    if input_structure is None:
        input_structure = ONE_TENSOR if len(inputs) == 1 else tuple_structure(len(inputs))
    check_layers(layers)
    constants = _Constants()
    descriptions = [describe([layer])[0] for layer in layers]
    stage: LayersFunction | None = None
    try:
        with _tracing(layers, trace_context, mode) as attention:
            captures = _capture(layers, descriptions, inputs, input_structure, trace_context, mode)
            stage = LayersFunction(
                layers,
                input_structure,
                gradient_layouts,
                trace_context,
                captures,
                constants.stand_in,
                copy_inputs,
            )
            module = export_joint(stage, (mode.key, *inputs), mode.mode, attention)
        constants.restore(module)
        return _checked_joint(module, layers, stage)
    except Exception as error:
        is_change_of_input = isinstance(error, InputMutated) or "in-place operation" in str(error)
        if is_change_of_input and not copy_inputs:
            # The first layer would change the caller's tensor. A pipeline's input stays unchanged: copy it.
            return trace(layers, inputs, gradient_layouts, input_structure, trace_context, mode, True)
        raise _untraceable(error, None if stage is None else stage.running_layer) from None


def _untraceable(error: Exception, running_layer: int | None) -> Untraceable:
    """Returns the reason why a trace has failed, given the layer whose graph was running."""
    match error:
        case Untraceable():
            error.layer = running_layer if error.layer is None else error.layer
            return error
        case Refused() | UnkeyedRandomOp():
            return Untraceable(running_layer, str(error))
        case fake_tensors.DataDependentOutputException():
            return Untraceable(running_layer, "it computes with a number read from a tensor")
    first_line = next(iter(str(error).strip().splitlines()), "")
    return Untraceable(running_layer, f"tracing raised {type(error).__name__}: {first_line}")


@contextlib.contextmanager
def _tracing(
    layers: Sequence[nn.Module], trace_context: TraceContext, mode: TraceMode
) -> Iterator[Callable[..., Tensor | None] | None]:
    """Prepares PyTorch and the layers for a trace in a block; yields what replaces attention, if anything."""
    is_absent = trace_context.is_absent
    with (
        interrupts_deferred(),
        tensors_restored(layers),
        fake_tensors.logging_disabled(),
        default_arguments_known(),
        backward_without_gpu() if is_absent else made_current(trace_context.device),
    ):
        if trace_context.device is not None:
            _place_tensors(layers, trace_context.device, mode)
        yield choose_attention if is_absent and not torch.cuda.is_available() else None


def _capture(
    layers: Sequence[nn.Module],
    descriptions: Sequence[Hashable],
    inputs: Sequence[Tensor],
    input_structure: Structure,
    trace_context: TraceContext,
    mode: TraceMode,
) -> list[Captured]:
    """Captures the layers for copies of the inputs, which they may change in place."""
    with mode.mode:
        copies = [empty_like(x).copy_(x) for x in inputs]  # no leaves
    num_plain = len(copies) - sum(trace_context.popped)
    with deferring(trace_context.deferred):
        return capture_layers(
            layers,
            descriptions,
            input_structure.build(copies[:num_plain]),
            skips_from(trace_context, copies[num_plain:]),
            mode.key,
            mode.mode,
            trace_context.find_state,
            trace_context.is_absent,
        )


def _tag_backward(graph: fx.Graph) -> None:
    """Tags the nodes that depend on a tangent; PyTorch omits those of a custom function's backward."""
    backward = {
        node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(node.meta["desc"], aot.TangentAOTInput)
    }
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and not backward.isdisjoint(node.all_input_nodes):
            node.meta["partitioner_tag"] = "is_backward"
            backward.add(node)


class _Constants:
    """The tensors that graphs use beside inputs, parameters and buffers, and what stands for them in a trace.

    The trace computes with uninitialized tensors in their place, since it would apply in-place operators.
    """

    def __init__(self) -> None:
        self._by_storage: dict[int, tuple[Tensor, Tensor]] = {}
        self._stand_ins: dict[int, Tensor] = {}

    def stand_in(self, constant: Tensor) -> Tensor:
        """Returns a tensor for a trace to use in place of a constant."""
        found = self._stand_ins.get(id(constant))
        if found is None:
            with disable_current_modes():
                found = empty_like(constant).requires_grad_(constant.requires_grad)
            self._stand_ins[id(constant)] = found
            self._by_storage[found.untyped_storage()._cdata] = (found, constant)
        return found

    def restore(self, module: fx.GraphModule) -> None:
        """Puts the constants in the place of those tensors in a graph."""
        for node in module.graph.find_nodes(op="get_attr"):
            value = getattr(module, str(node.target))
            if isinstance(value, Tensor) and value.untyped_storage()._cdata in self._by_storage:
                _, constant = self._by_storage[value.untyped_storage()._cdata]
                with_bits(node.meta["val"], bits_of(constant))  # which PyTorch has left out
                if isinstance(constant, nn.Parameter):
                    delattr(module, str(node.target))
                setattr(module, str(node.target), constant)


def _place_tensors(layers: Sequence[nn.Module], device: torch.device, mode: TraceMode) -> None:
    """Replaces parameters and buffers on other devices by fake ones on the device, and rows by whole ones."""
    replaced: dict[Tensor, Tensor] = {}
    for module in (module for layer in layers for module in layer.modules()):
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or not (devices_differ(tensor.device, device) or is_gathered(tensor)):
                    continue
                if tensor not in replaced:
                    replaced[tensor] = stand_in(tensor, lambda each: mode.empty(each, device, False))
                table[name] = replaced[tensor]


def _checked_joint(module: fx.GraphModule, layers: Sequence[nn.Module], stage: LayersFunction) -> JointGraph:
    """Reads an exported graph, and checks that programs can compute it."""
    _tag_backward(module.graph)
    read_triton_calls(module.graph)
    _drop_meshes(module.graph)
    check_graph(module)
    joint = _read_joint(module, layers, stage)
    warn_of_autocast(module)
    check_constants(joint, layers)
    return joint


class _Ports:
    """Translates PyTorch's descriptors of a graph's placeholders and results into ports."""

    def __init__(self, module: fx.GraphModule, layers: Sequence[nn.Module]) -> None:
        self._names, self._module = nn.Module(), module
        self._names.layers = nn.ModuleList(layers)
        index = {id(p): i for i, p in enumerate(parameters_of(layers))}
        self._buffer_index = {id(b): i for i, b in enumerate(buffers_of(layers))}
        named = self._names.named_parameters(remove_duplicate=False)
        self._parameters = {name: index[id(p)] for name, p in named}
        buffers = self._names.named_buffers(remove_duplicate=False)
        self._buffers = {name: self._buffer_index[id(b)] for name, b in buffers}
        # How the function names the parts of parameters; those of wrappers are named by the trace.
        parts = enumerate(attribute_parts(layers))
        self._buffers |= {f"part_{i}": self._buffer_index[id(part)] for i, part in parts}

    def quantized(self, layers: Sequence[nn.Module]) -> set[GraphPort]:
        """Returns the ports of quantized parameters, and of the parts of parameters."""
        parameters = parameters_of(layers)
        parts = {id(part) for p in parameters for part in parts_of(p).values()}
        found = {GraphPort(GraphRole.BUFFER, i) for key, i in self._buffer_index.items() if key in parts}
        return found | {
            GraphPort(GraphRole.PARAMETER, i) for i, p in enumerate(parameters) if is_quantized(p)
        }

    def _tensor(self, desc: object) -> Tensor:
        match desc:
            case aot.SubclassGetAttrAOTInput():
                found: Tensor = getattr(self._tensor(desc.base), desc.attr)
            case aot.ParamAOTInput():
                found = self._names.get_parameter(desc.target)
        return found

    def of(self, desc: object) -> GraphPort:
        """Returns the port that a descriptor describes.

        Raises:
            InputMutated: it is the new value of an input.
            Untraceable: there is none.
        """
        match desc:
            case aot.ParamAOTInput():
                return GraphPort(GraphRole.PARAMETER, self._parameters[desc.target])
            case aot.BufferAOTInput():
                return GraphPort(GraphRole.BUFFER, self._buffers[desc.target])
            case aot.SubclassGetAttrAOTInput(base=aot.ParamAOTInput() as parameter) if is_sharded(
                self._names.get_parameter(parameter.target)
            ):
                return GraphPort(GraphRole.PARAMETER, self._parameters[parameter.target])
            case aot.SubclassGetAttrAOTInput():
                return GraphPort(GraphRole.BUFFER, self._buffer_index[id(self._tensor(desc))])
            case aot.PlainAOTInput():
                return GraphPort(GraphRole.INPUT, desc.idx - 1) if desc.idx else GraphPort(GraphRole.KEY, 0)
            case aot.TangentAOTInput(output=aot.PlainAOTOutput() as output):
                return GraphPort(GraphRole.TANGENT, output.idx)
            case (
                aot.InputMutationAOTOutput(mutated_input=aot.PlainAOTInput())
                | aot.TangentAOTInput(output=aot.InputMutationAOTOutput(mutated_input=aot.PlainAOTInput()))
            ):
                raise InputMutated
            case aot.PlainAOTOutput():
                return GraphPort(GraphRole.OUTPUT, desc.idx)
            case aot.InputMutationAOTOutput(mutated_input=aot.BufferAOTInput() as buffer) if (
                "." in buffer.target  # else, part of a quantized parameter
            ):
                return GraphPort(GraphRole.BUFFER, self._buffers[buffer.target])
            case aot.GradAOTOutput(grad_of=aot.ParamAOTInput() as parameter):
                return GraphPort(GraphRole.PARAMETER_GRADIENT, self._parameters[parameter.target])
            case aot.SubclassGetAttrAOTOutput(
                base=aot.GradAOTOutput(grad_of=aot.ParamAOTInput() as parameter)
            ):
                index = self._parameters[parameter.target]
                placements = self._module.meta[PLACEMENTS][parameter.target]
                return GraphPort(GraphRole.PARAMETER_GRADIENT, index, placements=placements)
            case aot.GradAOTOutput(grad_of=aot.PlainAOTInput() as plain):
                return GraphPort(GraphRole.INPUT_GRADIENT, plain.idx - 1)
        raise Untraceable(
            None, f"the trace has {desc}, which is not a parameter, buffer, input, output or gradient"
        )


def _read_joint(module: fx.GraphModule, layers: Sequence[nn.Module], stage: LayersFunction) -> JointGraph:
    """Reads an exported graph."""
    ports = _Ports(module, layers)
    for tangent in module.graph.find_nodes(op="placeholder"):
        remove_arrive(tangent)
    _remove_whole_slices(module.graph)
    placeholders = [n for n in module.graph.find_nodes(op="placeholder") if not _is_mesh(n.meta["desc"])]
    inputs = [PortNode(ports.of(n.meta["desc"]), n) for n in placeholders]
    quantized = ports.quantized(layers)
    for each in inputs:
        each.node.meta[IS_QUANTIZED] = each.port in quantized
    if stage.copy_inputs:
        _drop_copies(module.graph, inputs, stage.written_inputs)
    *_, result = module.graph.nodes
    (results,) = result.args
    assert isinstance(results, (list, tuple))
    descriptors = result.meta["desc"]
    outputs = [
        PortNode(replace(ports.of(d), keeps_version=_keeps_version(n)), n)
        for n, d in zip(results, descriptors, strict=True)
        if isinstance(n, fx.Node)
    ]
    return JointGraph(
        module,
        tuple(inputs),
        tuple(_before_clone(n) for n in outputs),
        len(layers),
        stage.output_structure,
        stage.stashed,
        stage.written_inputs,
        stage.unfused_layers,
    )


def _drop_copies(graph: fx.Graph, inputs: Sequence[PortNode], written: Collection[int]) -> None:
    """Lets a graph read inputs that no layer changes, not their copies, which begin at another address.

    The last bits of a product depend on whether an operand begins at a multiple of 64 bytes.
    """
    for port, node in ((each.port, each.node) for each in inputs):
        if port.role is not GraphRole.INPUT or port.index in written:
            continue
        for copy in list(node.users):
            if copy.target is torch.ops.aten.copy.default and copy.args[1] is node:
                memory, _ = copy.all_input_nodes
                copy.replace_all_uses_with(node)
                graph.erase_node(copy)
                graph.erase_node(memory)


def _drop_meshes(graph: fx.Graph) -> None:
    """Drops the meshes of gradients, some of them constants, from the results of a graph."""
    result = graph.output_node()
    (results,) = result.args
    assert isinstance(results, (list, tuple))
    descriptors = result.meta["desc"]
    kept = [None if _is_mesh(desc) else node for node, desc in zip(results, descriptors, strict=True)]
    result.args = (kept,)
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)


def _is_mesh(desc: object) -> bool:
    """Returns whether a placeholder or result is the mesh of a sharded tensor."""
    kinds = (aot.SubclassGetAttrAOTInput, aot.SubclassGetAttrAOTOutput)
    return isinstance(desc, kinds) and desc.attr == "device_mesh"


def _keeps_version(node: fx.Node) -> bool:
    """Returns whether a node is a result of the functional form of an operator that writes some arguments.

    Such operators, as batch norm, do not increment the versions of what they write: pytorch/pytorch#120622.
    """
    origin = node.args[0] if node.target is operator.getitem else None
    return isinstance(origin, fx.Node) and "_functional." in str(origin.target)


def _remove_whole_slices(graph: fx.Graph) -> None:
    """Removes slices of whole dimensions, which PyTorch records only if sizes are symbols."""
    for node in graph.nodes:
        first = _SLICES.get(node.target)
        if first is None:
            continue
        given = list(node.args[first:])
        start, end, step = given + [None, None, 1][len(given) :]
        if start in (None, 0) and end in (None, sys.maxsize) and step == 1:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


# The position of the argument ``start``, if there is one.
_SLICES: dict[Any, int] = {
    torch.ops.aten.alias.default: 1,
    torch.ops.aten.slice.Tensor: 2,
    torch.ops.aten.slice_backward.default: 3,
}


def _before_clone(output: PortNode) -> PortNode:
    """Returns the output that ``LayersFunction`` cloned, with its original strides."""
    if output.port.role is not GraphRole.OUTPUT or output.node.target is not torch.ops.aten.clone.default:
        return output
    original = output.node.args[0]
    assert isinstance(original, fx.Node)
    return PortNode(output.port, original)
