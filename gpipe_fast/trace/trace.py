"""Traces a stage for one signature to a joint graph, or returns the reason why the stage is untraceable."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from gpipe_fast.layers import phase
from gpipe_fast.layers.structure import ONE_TENSOR, Structure, tuple_structure
from gpipe_fast.randomness.random import UnkeyedRandomOp
from gpipe_fast.trace import python_reads, torch_private
from gpipe_fast.trace.absent_device import AbsentDevice, backward_without_gpu, choose_attention
from gpipe_fast.trace.fingerprint import unguardable_reason
from gpipe_fast.trace.function import InputMutated, InvalidStageOutput, LayersFunction, UntraceableError
from gpipe_fast.trace.function import TraceContext as TraceContext
from gpipe_fast.trace.gradient_layouts import GradientLayouts, remove_arrive
from gpipe_fast.trace.restore_point import GENERATOR, Change
from gpipe_fast.trace.trace_observer import TraceObserver, Unrepeatable, user_code_line
from gpipe_fast.trace.traceability import Untraceable, check_graph, check_layers
from gpipe_fast.trace.triton_calls import default_arguments_known, read_triton_calls


class GraphRole(str, Enum):
    """The role of a tensor that enters or leaves a stage's graph."""

    PARAMETER = "parameter"
    PARAMETER_CAST = "parameter_cast"
    BUFFER = "buffer"
    KEY = "key"
    INPUT = "input"
    OUTPUT = "output"
    SAVED = "saved"
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
    """

    role: GraphRole
    index: int
    cast_to: torch.dtype | None = None

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
        writes_inputs: whether layers change their inputs in place; in the graph they change copies.
        unfused_layers: indices of layers whose attention with dropout runs without a fused kernel on a GPU.
        parameter_uses: the number of reads of each parameter in the layers' forward, if the graph no longer
            shows them because casts of parameters were hoisted; else None.
    """

    module: fx.GraphModule
    inputs: tuple[PortNode, ...]
    outputs: tuple[PortNode, ...]
    num_layers: int
    structure: Structure = ONE_TENSOR
    stashed: tuple[bool, ...] = ()
    writes_inputs: bool = False
    unfused_layers: tuple[int, ...] = ()
    parameter_uses: Mapping[int, int] | None = None

    def of(self, role: GraphRole) -> dict[int, fx.Node]:
        """Returns the result nodes with this role by index, or the placeholders if no result has it."""
        found = {n.port.index: n.node for n in self.outputs if n.port.role is role}
        return found or {n.port.index: n.node for n in self.inputs if n.port.role is role}

    def differentiable_outputs(self) -> frozenset[int]:
        """Returns the indices of the outputs that take a gradient."""
        return frozenset(n.port.index for n in self.inputs if n.port.role is GraphRole.TANGENT)


def parameters_of(layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Returns the parameters of a stage in the order of their ports, tied parameters once."""
    return list({id(p): p for layer in layers for p in layer.parameters()}.values())


def buffers_of(layers: Iterable[nn.Module]) -> list[Tensor]:
    """Returns the buffers of a stage in the order of their ports, tied buffers once."""
    return list({id(b): b for layer in layers for b in layer.buffers()}.values())


# No skip connections, no deferred batch norm.
_NO_CONTEXT = TraceContext()


def trace(
    layers: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    gradient_layouts: GradientLayouts = (),
    input_structure: Structure | None = None,
    trace_context: TraceContext = _NO_CONTEXT,
) -> JointGraph | Untraceable:
    """Traces one stage for inputs with the given shapes, dtypes, strides and ``requires_grad``.

    With gradients enabled the graph contains forward and backward. Under ``no_grad`` it contains the forward
    alone; this needs a trace of its own, because some layers then run other code.

    Args:
        layers: the stage's layers. The trace restores their state, except caches that it fills.
        inputs: one micro-batch of the stage's input. Only shapes, dtypes, strides and ``requires_grad`` are
            used, never the contents.
        gradient_layouts: outputs whose gradient arrives in another layout than the output's, or never.
        input_structure: the nesting of the inputs in the first layer's argument; by default the argument is
            one tensor, or a tuple of several.
        trace_context: skip connections, batch norm mode and device of the layers.

    Returns:
        The graph, or the reason why the stage cannot be traced faithfully.
    """
    if input_structure is None:
        input_structure = ONE_TENSOR if len(inputs) == 1 else tuple_structure(len(inputs))
    untraceable = check_layers(layers)
    if untraceable is not None:
        return untraceable
    return _trace(layers, inputs, gradient_layouts, input_structure, trace_context, None)[0]


def trace_symbolic(
    layers: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    gradient_layouts: GradientLayouts,
    input_structure: Structure,
    trace_context: TraceContext,
    varying: Sequence[Sequence[bool]],
) -> tuple[JointGraph, torch_private.Symbols] | None:
    """Traces like `trace`, with symbols for the sizes that ``varying`` selects.

    Returns:
        The graph and its symbols; None if the stage cannot be traced, or if a size depends on data.
    """
    joint, symbols = _trace(
        layers, inputs, gradient_layouts, input_structure, trace_context, [(False,), *varying]
    )
    return None if isinstance(joint, Untraceable) or symbols is None else (joint, symbols)


_TraceResult = tuple[JointGraph | Untraceable, torch_private.Symbols | None]


def _trace(
    layers: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    gradient_layouts: GradientLayouts,
    input_structure: Structure,
    trace_context: TraceContext,
    varying: Sequence[Sequence[bool]] | None,
) -> _TraceResult:
    def attempt(copy_inputs: bool, trace_observer: TraceObserver) -> _TraceResult:
        stage = LayersFunction(
            layers, input_structure, gradient_layouts, trace_context, trace_observer, copy_inputs
        )
        try:
            return _trace_once(layers, inputs, stage, varying)
        finally:
            python_reads.record(layers, trace_observer.reads)

    copy_inputs, first = False, TraceObserver(layers)
    try:
        found, symbols = attempt(copy_inputs, first)
    except InputMutated:
        # The first layer would change the caller's tensor. A pipeline's input stays unchanged: copy it.
        copy_inputs, first = True, TraceObserver(layers)
        found, symbols = attempt(copy_inputs, first)
    if isinstance(found, _SideEffect) and first.keep_caches():
        # A change that only the first call makes fills a cache; one that the second repeats is a side effect.
        found, symbols = attempt(copy_inputs, second := TraceObserver(layers))
        if isinstance(found, Untraceable):
            second.restore()
            first.restore()
    elif isinstance(found, _SideEffect):
        first.restore()
    if isinstance(found, _SideEffect):
        if not found.draws:
            first.mark_unrepeatable(found.layer)
            python_reads.record(layers, first.reads)
        return Untraceable(found.layer, found.reason), None
    if isinstance(found, Untraceable):
        return found, None
    for index, layer in enumerate(layers):
        reason = unguardable_reason(layer)
        if reason is not None:
            python_reads.mark_unrepeatable(layer)
            return Untraceable(index, reason), None
    return found, symbols


def _trace_once(
    layers: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    stage: LayersFunction,
    varying: Sequence[Sequence[bool]] | None,
) -> _TraceResult:
    key = torch.zeros(3, dtype=torch.int64)
    device = stage.trace_context.device
    absent = AbsentDevice(device) if device is not None and stage.trace_context.is_absent else None
    example = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs)
    if absent is not None:
        example = tuple(map(absent.tensor, example))
    symbols: torch_private.Symbols | None = None
    trace_observer = stage.trace_observer
    failure: Untraceable | None = None
    traced = False
    try:
        if absent is None:
            _replace_parameters(layers, device)
        else:
            absent.replace_tensors(layers)
        with (
            phase.phase_scope(tracing=True),
            _logging_disabled(),
            default_arguments_known(),
            contextlib.nullcontext() if absent is None else backward_without_gpu(),
        ):
            if varying is None:
                mode = None if absent is None else absent.mode
                attention = None if absent is None or torch.cuda.is_available() else choose_attention
                module = torch_private.export_joint(stage, (key, *example), mode, attention)
            else:
                module, symbols = torch_private.export_symbolic(stage, (key, *example), varying)
        traced = True
    except (UntraceableError, UnkeyedRandomOp, Unrepeatable, phase.PhaseQueryWhileTracing) as error:
        kind = TypeError if isinstance(error, InvalidStageOutput) else RuntimeError
        failure = Untraceable(trace_observer.layer, str(error), error=kind)
    except Exception as error:
        if (
            "in-place operation" in str(error)
            and not stage.copy_inputs
            and trace_observer.untraceable is None
        ):
            raise InputMutated from error
        reason = f"tracing raised {type(error).__name__}: {_first_line(error)}{user_code_line(error)}"
        failure = Untraceable(trace_observer.layer, reason)
    finally:
        changes = trace_observer.changes() if traced and trace_observer.untraceable is None else []
        if not changes:
            trace_observer.restore()
    if trace_observer.untraceable is not None:  # the layer may have caught the exception
        return trace_observer.untraceable, None
    if failure is not None:
        return failure, None
    if changes:
        return _SideEffect.of(changes[0]), None
    read_triton_calls(module.graph)
    try:
        return check_graph(module) or _read_joint(module, layers, stage), symbols
    except UntraceableError as error:
        return Untraceable(None, str(error)), None


@dataclass(frozen=True)
class _SideEffect(Untraceable):
    """A trace that changed Python state; ``draws`` says whether it was a random generator's state."""

    draws: bool = False

    @classmethod
    def of(cls, change: Change) -> _SideEffect:
        if change.label.startswith(GENERATOR):
            return cls(change.layer, f"it draws from {change.label}", draws=True)
        verb = "changes" if " " in change.label else "sets"
        return cls(change.layer, f"its forward {verb} {change.label}, a side effect")


@contextlib.contextmanager
def _logging_disabled() -> Iterator[None]:
    """Keeps PyTorch from logging a failed trace: the layer then runs in Python, which is not an error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _replace_parameters(layers: Sequence[nn.Module], device: torch.device | None) -> None:
    """Replaces parameters on other devices by uninitialized ones on ``device``; a trace reads no elements."""
    replacements: dict[Tensor, nn.Parameter] = {}
    for module in (module for layer in layers for module in layer.modules()):
        for name, parameter in module._parameters.items():
            if parameter is not None and device is not None and parameter.device != device:
                if parameter not in replacements:
                    uninitialized = torch.empty_like(parameter, device=device)
                    replacements[parameter] = nn.Parameter(uninitialized, parameter.requires_grad)
                module._parameters[name] = replacements[parameter]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _read_joint(module: fx.GraphModule, layers: Sequence[nn.Module], stage: LayersFunction) -> JointGraph:
    """Reads an exported graph: translates PyTorch's descriptors of placeholders and results into ports."""
    names = nn.Module()
    names.layers = nn.ModuleList(layers)
    parameter_index = {id(p): i for i, p in enumerate(parameters_of(layers))}
    buffer_index = {id(b): i for i, b in enumerate(buffers_of(layers))}
    parameters = {n: parameter_index[id(p)] for n, p in names.named_parameters(remove_duplicate=False)}
    buffers = {n: buffer_index[id(b)] for n, b in names.named_buffers(remove_duplicate=False)}

    def port(desc: object) -> GraphPort:
        match desc:
            case torch_private.ParamAOTInput():
                return GraphPort(GraphRole.PARAMETER, parameters[desc.target])
            case torch_private.BufferAOTInput():
                return GraphPort(GraphRole.BUFFER, buffers[desc.target])
            case torch_private.PlainAOTInput():
                return GraphPort(GraphRole.INPUT, desc.idx - 1) if desc.idx else GraphPort(GraphRole.KEY, 0)
            case torch_private.TangentAOTInput(output=torch_private.PlainAOTOutput() as output):
                return GraphPort(GraphRole.TANGENT, output.idx)
            case (
                torch_private.InputMutationAOTOutput(mutated_input=torch_private.PlainAOTInput())
                | torch_private.TangentAOTInput(
                    output=torch_private.InputMutationAOTOutput(mutated_input=torch_private.PlainAOTInput())
                )
            ):
                raise InputMutated
            case torch_private.PlainAOTOutput():
                return GraphPort(GraphRole.OUTPUT, desc.idx)
            case torch_private.InputMutationAOTOutput(mutated_input=torch_private.BufferAOTInput() as buffer):
                return GraphPort(GraphRole.BUFFER, buffers[buffer.target])
            case torch_private.GradAOTOutput(grad_of=torch_private.ParamAOTInput() as parameter):
                return GraphPort(GraphRole.PARAMETER_GRADIENT, parameters[parameter.target])
            case torch_private.GradAOTOutput(grad_of=torch_private.PlainAOTInput() as plain):
                return GraphPort(GraphRole.INPUT_GRADIENT, plain.idx - 1)
        raise UntraceableError(
            f"the trace has {desc}, which is not a parameter, buffer, input, output or gradient"
        )

    for tangent in module.graph.find_nodes(op="placeholder"):
        remove_arrive(tangent)
    *_, result = module.graph.nodes
    (results,) = result.args
    assert isinstance(results, (list, tuple))
    descriptors = result.meta["desc"]
    inputs = [PortNode(port(n.meta["desc"]), n) for n in module.graph.find_nodes(op="placeholder")]
    outputs = [
        PortNode(port(d), n) for n, d in zip(results, descriptors, strict=True) if isinstance(n, fx.Node)
    ]
    return JointGraph(
        module,
        tuple(inputs),
        tuple(_before_clone(n) for n in outputs),
        len(layers),
        stage.output_structure,
        stage.stashed,
        stage.copy_inputs,
        stage.unfused_layers,
    )


def _before_clone(output: PortNode) -> PortNode:
    """Returns the output that ``LayersFunction`` cloned, with its original strides."""
    if output.port.role is not GraphRole.OUTPUT or output.node.target is not torch.ops.aten.clone.default:
        return output
    original = output.node.args[0]
    assert isinstance(original, fx.Node)
    return PortNode(output.port, original)
