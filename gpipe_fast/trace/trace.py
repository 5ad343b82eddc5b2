"""A stage and a signature to one joint forward-and-backward graph, or the reason why not."""

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
    """What a tensor that enters or leaves a stage's graph is."""

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
    """One placeholder or result of a graph: its role, and its index among those of that role."""

    role: Role
    index: int

    def __str__(self) -> str:
        return f"{self.role.value}[{self.index}]"


class Node(NamedTuple):
    """A port and the graph node behind it."""

    port: Port
    node: fx.Node


@dataclass(frozen=True)
class Joint:
    """The traced forward and backward of one stage.

    Attributes:
        module: the graph, functional, and the constants it refers to.
        inputs: every placeholder, in graph order. Parameters and buffers that are tied count once.
        outputs: forward results, new values of written buffers, gradients; absent gradients are left out.
        num_layers: how many layers were traced; ``node.meta['custom']['layer']`` counts from 0.
        structure: how the last layer's outputs are nested.
        stashed: which of the stashes are tensors, outputs too, behind the last layer's; the others are None.
        writes_inputs: whether layers change inputs in place; copies of them, here.
        unfused: layers whose attention with dropout a GPU computes without a fused kernel.
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
        """Nodes of the results (else the placeholders) with this role, by index."""
        found = {n.port.index: n.node for n in self.outputs if n.port.role is role}
        return found or {n.port.index: n.node for n in self.inputs if n.port.role is role}

    def differentiable_outputs(self) -> frozenset[int]:
        """Which outputs take a gradient."""
        return frozenset(n.port.index for n in self.inputs if n.port.role is Role.TANGENT)


def parameters_of(layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of a stage, tied ones once, in the order of their ports."""
    return list({id(p): p for layer in layers for p in layer.parameters()}.values())


def buffers_of(layers: Iterable[nn.Module]) -> list[Tensor]:
    """The buffers of a stage, tied ones once, in the order of their ports."""
    return list({id(b): b for layer in layers for b in layer.buffers()}.values())


# Layers with nothing around them.
_ALONE = Setting()


def trace(
    layers: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    arrivals: Arrivals = (),
    takes: Structure | None = None,
    setting: Setting = _ALONE,
) -> Joint | Untraceable:
    """Traces one stage for inputs of the given shapes, dtypes, strides and need of gradients.

    With gradients enabled the graph holds forward and backward; under ``no_grad``, the forward alone, traced
    by itself because some layers then take another path.

    Args:
        layers: the stage's layers. They are left as they were.
        inputs: one micro-batch of the stage's input; only described, never read.
        arrivals: outputs whose gradient arrives in another layout than their own, or never.
        takes: how the inputs are nested in what the first layer is called with; by default it is a tensor, or
            a tuple of several.
        setting: what surrounds the layers.
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
    """As `trace`, with symbols for the sizes that ``varying`` names; None if that cannot be done."""
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
        # As the first layers of a model change its caller's tensor; a pipeline's input stays as it was.
        copy_inputs, first = True, Observation(layers)
        found, symbols = attempt(copy_inputs, first)
    if isinstance(found, _SideEffect) and first.keep_caches():
        # What only the first call changes is a cache; what the second one changes too is a side effect.
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
    if observation.refusal is not None:  # which the layer itself may have caught
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
    """A trace that changed something; whether ``draws`` says that it was a generator's state."""

    draws: bool = False

    @classmethod
    def of(cls, change: Change) -> _SideEffect:
        if change.what.startswith(GENERATOR):
            return cls(change.layer, f"it draws from {change.what}", draws=True)
        verb = "changes" if " " in change.what else "sets"
        return cls(change.layer, f"its forward {verb} {change.what}, a side effect")


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Keeps PyTorch from logging a trace that fails, since the layer then runs in Python."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _bring(layers: Sequence[nn.Module], device: torch.device | None) -> None:
    """Gives layers parameters on a device, whose elements nobody reads, in place of those elsewhere."""
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
    """Translates PyTorch's descriptors into ports."""
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
        raise Refused(
            f"the trace has {desc}, which is neither a parameter, a buffer, an input nor their gradient"
        )

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
    """An output before ``LayersFunction`` cloned it, and so with its own strides."""
    if output.port.role is not Role.OUTPUT or output.node.target is not torch.ops.aten.clone.default:
        return output
    original = output.node.args[0]
    assert isinstance(original, fx.Node)
    return Node(output.port, original)
