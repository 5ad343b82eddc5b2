"""Traces a stage for one signature to a joint forward-and-backward graph, or says why it cannot."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from gpipe_fast.layers import phase
from gpipe_fast.layers.structure import ONE_TENSOR, Structure, tuple_of
from gpipe_fast.randomness.random import UnkeyedRandomOp
from gpipe_fast.trace import aot, reads
from gpipe_fast.trace.arrival import Arrivals, take_out
from gpipe_fast.trace.before import GENERATOR, Change
from gpipe_fast.trace.fingerprint import unguardable
from gpipe_fast.trace.function import ChangesInput, LayersFunction, NotPassedOn, Refused
from gpipe_fast.trace.function import Setting as Setting
from gpipe_fast.trace.observe import Observation, Unrepeatable, line_of
from gpipe_fast.trace.refuse import Untraceable, refuse_graph, refuse_layers


class Role(str, Enum):
    """The role of a tensor that enters or leaves a stage's graph."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    KEY = "key"
    INPUT = "input"
    OUTPUT = "output"
    SAVED = "saved"
    TANGENT = "tangent"
    PARAMETER_GRADIENT = "parameter_gradient"
    INPUT_GRADIENT = "input_gradient"


@dataclass(frozen=True)
class Port:
    """One placeholder or result of a graph: its role, and its index among the tensors with that role."""

    role: Role
    index: int

    def __str__(self) -> str:
        return f"{self.role.value}[{self.index}]"


class Node(NamedTuple):
    """A port and its graph node."""

    port: Port
    node: fx.Node


@dataclass(frozen=True)
class Joint:
    """The traced forward and backward of one stage.

    Attributes:
        module: the functional graph, and the constants that it refers to.
        inputs: every placeholder, in graph order. Tied parameters and buffers count once.
        outputs: forward results, new values of written buffers, gradients. Absent gradients are left out.
        num_layers: the number of traced layers; ``node.meta['custom']['layer']`` counts them from 0.
        structure: the nesting of the last layer's outputs.
        stashed: for each stashed skip connection, whether it is a tensor (else None). Stashed tensors are
            outputs of the graph, after the last layer's.
        writes_inputs: whether layers change their inputs in place; in the graph they change copies.
        unfused: indices of layers whose attention with dropout runs without a fused kernel on a GPU.
    """

    module: fx.GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    num_layers: int
    structure: Structure = ONE_TENSOR
    stashed: tuple[bool, ...] = ()
    writes_inputs: bool = False
    unfused: tuple[int, ...] = ()

    def of(self, role: Role) -> dict[int, fx.Node]:
        """Returns the result nodes with this role by index, or the placeholders if no result has it."""
        found = {n.port.index: n.node for n in self.outputs if n.port.role is role}
        return found or {n.port.index: n.node for n in self.inputs if n.port.role is role}

    def differentiable_outputs(self) -> frozenset[int]:
        """Returns the indices of the outputs that take a gradient."""
        return frozenset(n.port.index for n in self.inputs if n.port.role is Role.TANGENT)


def parameters_of(layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Returns the parameters of a stage in the order of their ports, tied parameters once."""
    return list({id(p): p for layer in layers for p in layer.parameters()}.values())


def buffers_of(layers: Iterable[nn.Module]) -> list[Tensor]:
    """Returns the buffers of a stage in the order of their ports, tied buffers once."""
    return list({id(b): b for layer in layers for b in layer.buffers()}.values())


# No skip connections, no deferred batch norm.
_ALONE = Setting()


def trace(
    layers: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    arrivals: Arrivals = (),
    takes: Structure | None = None,
    setting: Setting = _ALONE,
) -> Joint | Untraceable:
    """Traces one stage for inputs with the given shapes, dtypes, strides and ``requires_grad``.

    With gradients enabled the graph contains forward and backward. Under ``no_grad`` it contains the forward
    alone; this needs a trace of its own, because some layers then run other code.

    Args:
        layers: the stage's layers. The trace restores their state, except caches that it fills.
        inputs: one micro-batch of the stage's input. Only shapes, dtypes, strides and ``requires_grad`` are
            used, never the contents.
        arrivals: outputs whose gradient arrives in another layout than their own, or never.
        takes: the nesting of the inputs in the first layer's argument; by default the argument is one tensor,
            or a tuple of several.
        setting: skip connections, batch norm mode and device of the layers.

    Returns:
        The graph, or the reason why the stage cannot be traced faithfully.
    """
    if takes is None:
        takes = ONE_TENSOR if len(inputs) == 1 else tuple_of(len(inputs))
    refusal = refuse_layers(layers)
    if refusal is not None:
        return refusal
    return _trace(layers, inputs, arrivals, takes, setting, None)[0]


def trace_symbolic(
    layers: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    arrivals: Arrivals,
    takes: Structure,
    setting: Setting,
    varying: Sequence[Sequence[bool]],
) -> tuple[Joint, aot.Symbols] | None:
    """Traces like `trace`, with symbols for the sizes that ``varying`` selects.

    Returns:
        The graph and its symbols; None if the stage cannot be traced, or if a size depends on data.
    """
    joint, symbols = _trace(layers, inputs, arrivals, takes, setting, [(False,), *varying])
    return None if isinstance(joint, Untraceable) or symbols is None else (joint, symbols)


_Found = tuple[Joint | Untraceable, aot.Symbols | None]


def _trace(
    layers: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    arrivals: Arrivals,
    takes: Structure,
    setting: Setting,
    varying: Sequence[Sequence[bool]] | None,
) -> _Found:
    def attempt(copy_inputs: bool, observation: Observation) -> _Found:
        stage = LayersFunction(layers, takes, arrivals, setting, observation, copy_inputs)
        try:
            return _attempt(layers, inputs, stage, varying)
        finally:
            reads.note(layers, observation.reads)

    copy_inputs, first = False, Observation(layers)
    try:
        found, symbols = attempt(copy_inputs, first)
    except ChangesInput:
        # The first layer would change the caller's tensor. A pipeline's input stays unchanged: copy it.
        copy_inputs, first = True, Observation(layers)
        found, symbols = attempt(copy_inputs, first)
    if isinstance(found, _SideEffect) and first.keep_caches():
        # A change that only the first call makes fills a cache; one that the second repeats is a side effect.
        found, symbols = attempt(copy_inputs, second := Observation(layers))
        if isinstance(found, Untraceable):
            second.put_back()
            first.put_back()
    elif isinstance(found, _SideEffect):
        first.put_back()
    if isinstance(found, _SideEffect):
        if not found.draws:
            first.cannot_repeat(found.layer)
            reads.note(layers, first.reads)
        return Untraceable(found.layer, found.reason), None
    if isinstance(found, Untraceable):
        return found, None
    for index, layer in enumerate(layers):
        reason = unguardable(layer)
        if reason is not None:
            reads.cannot_repeat(layer)
            return Untraceable(index, reason), None
    return found, symbols


def _attempt(
    layers: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    stage: LayersFunction,
    varying: Sequence[Sequence[bool]] | None,
) -> _Found:
    key = torch.zeros(3, dtype=torch.int64)
    example = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs)
    symbols: aot.Symbols | None = None
    observation = stage.observation
    failure: Untraceable | None = None
    traced = False
    try:
        _bring(layers, stage.setting.device)
        with phase.entered(tracing=True), _unlogged():
            if varying is None:
                module = aot.export_joint(stage, (key, *example))
            else:
                module, symbols = aot.export_symbolic(stage, (key, *example), varying)
        traced = True
    except (Refused, UnkeyedRandomOp, Unrepeatable, phase.AskedWhileTracing) as error:
        kind = TypeError if isinstance(error, NotPassedOn) else RuntimeError
        failure = Untraceable(observation.layer, str(error), error=kind)
    except Exception as error:
        if "in-place operation" in str(error) and not stage.copy_inputs and observation.refusal is None:
            raise ChangesInput from error
        reason = f"tracing raised {type(error).__name__}: {_first_line(error)}{line_of(error)}"
        failure = Untraceable(observation.layer, reason)
    finally:
        changes = observation.changes() if traced and observation.refusal is None else []
        if not changes:
            observation.put_back()
    if observation.refusal is not None:  # the layer may have caught the exception
        return observation.refusal, None
    if failure is not None:
        return failure, None
    if changes:
        return _SideEffect.of(changes[0]), None
    try:
        return refuse_graph(module) or _read(module, layers, stage), symbols
    except Refused as refused:
        return Untraceable(None, str(refused)), None


@dataclass(frozen=True)
class _SideEffect(Untraceable):
    """A trace that changed Python state; ``draws`` says whether it was a random generator's state."""

    draws: bool = False

    @classmethod
    def of(cls, change: Change) -> _SideEffect:
        if change.what.startswith(GENERATOR):
            return cls(change.layer, f"it draws from {change.what}", draws=True)
        verb = "changes" if " " in change.what else "sets"
        return cls(change.layer, f"its forward {verb} {change.what}, a side effect")


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Keeps PyTorch from logging a failed trace: the layer then runs in Python, which is not an error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _bring(layers: Sequence[nn.Module], device: torch.device | None) -> None:
    """Replaces parameters on other devices by uninitialized ones on ``device``; a trace reads no elements."""
    instead: dict[Tensor, nn.Parameter] = {}
    for module in (module for layer in layers for module in layer.modules()):
        for name, parameter in module._parameters.items():
            if parameter is not None and device is not None and parameter.device != device:
                if parameter not in instead:
                    there = torch.empty_like(parameter, device=device)
                    instead[parameter] = nn.Parameter(there, parameter.requires_grad)
                module._parameters[name] = instead[parameter]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _read(module: fx.GraphModule, layers: Sequence[nn.Module], stage: LayersFunction) -> Joint:
    """Reads an exported graph: translates PyTorch's descriptors of placeholders and results into ports."""
    names = nn.Module()
    names.layers = nn.ModuleList(layers)
    parameter_index = {id(p): i for i, p in enumerate(parameters_of(layers))}
    buffer_index = {id(b): i for i, b in enumerate(buffers_of(layers))}
    parameters = {n: parameter_index[id(p)] for n, p in names.named_parameters(remove_duplicate=False)}
    buffers = {n: buffer_index[id(b)] for n, b in names.named_buffers(remove_duplicate=False)}

    def port(desc: object) -> Port:
        match desc:
            case aot.ParamAOTInput():
                return Port(Role.PARAMETER, parameters[desc.target])
            case aot.BufferAOTInput():
                return Port(Role.BUFFER, buffers[desc.target])
            case aot.PlainAOTInput():
                return Port(Role.INPUT, desc.idx - 1) if desc.idx else Port(Role.KEY, 0)
            case aot.TangentAOTInput(output=aot.PlainAOTOutput() as output):
                return Port(Role.TANGENT, output.idx)
            case (
                aot.InputMutationAOTOutput(mutated_input=aot.PlainAOTInput())
                | aot.TangentAOTInput(output=aot.InputMutationAOTOutput(mutated_input=aot.PlainAOTInput()))
            ):
                raise ChangesInput
            case aot.PlainAOTOutput():
                return Port(Role.OUTPUT, desc.idx)
            case aot.InputMutationAOTOutput(mutated_input=aot.BufferAOTInput() as buffer):
                return Port(Role.BUFFER, buffers[buffer.target])
            case aot.GradAOTOutput(grad_of=aot.ParamAOTInput() as parameter):
                return Port(Role.PARAMETER_GRADIENT, parameters[parameter.target])
            case aot.GradAOTOutput(grad_of=aot.PlainAOTInput() as plain):
                return Port(Role.INPUT_GRADIENT, plain.idx - 1)
        raise Refused(f"the trace has {desc}, which is not a parameter, buffer, input, output or gradient")

    for tangent in module.graph.find_nodes(op="placeholder"):
        take_out(tangent)
    *_, result = module.graph.nodes
    (results,) = result.args
    assert isinstance(results, (list, tuple))
    descriptors = result.meta["desc"]
    inputs = [Node(port(n.meta["desc"]), n) for n in module.graph.find_nodes(op="placeholder")]
    outputs = [Node(port(d), n) for n, d in zip(results, descriptors, strict=True) if isinstance(n, fx.Node)]
    return Joint(
        module,
        tuple(inputs),
        tuple(_unclone(n) for n in outputs),
        len(layers),
        stage.returns,
        stage.stashed,
        stage.copy_inputs,
        stage.unfused,
    )


def _unclone(output: Node) -> Node:
    """Returns an output as it was before ``LayersFunction`` cloned it, with its own strides."""
    if output.port.role is not Role.OUTPUT or output.node.target is not torch.ops.aten.clone.default:
        return output
    original = output.node.args[0]
    assert isinstance(original, fx.Node)
    return Node(output.port, original)
