"""A stage and a signature to one joint forward-and-backward graph, or the reason why not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from gpipe_fast import aot
from gpipe_fast.fingerprint import snapshot
from gpipe_fast.random import KeyedRandomMode, UnkeyedRandomOp


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
    """

    module: fx.GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    num_layers: int

    def of(self, role: Role) -> dict[int, fx.Node]:
        """Nodes of the results (else the placeholders) with this role, by index."""
        found = {n.port.index: n.node for n in self.outputs if n.port.role is role}
        return found or {n.port.index: n.node for n in self.inputs if n.port.role is role}

    def differentiable_outputs(self) -> frozenset[int]:
        """Which outputs take a gradient."""
        return frozenset(n.port.index for n in self.inputs if n.port.role is Role.TANGENT)

    def differentiable_inputs(self) -> frozenset[int]:
        """Which inputs are given a gradient."""
        return frozenset(n.port.index for n in self.outputs if n.port.role is Role.INPUT_GRADIENT)


@dataclass(frozen=True)
class Untraceable:
    """A stage that cannot be traced faithfully.

    Attributes:
        layer: index of the layer within the stage, or None when no single layer is to blame.
        reason: what stands in the way, one sentence without a full stop.
    """

    layer: int | None
    reason: str


class _Stage(nn.Module):
    """The layers as one function of (key, inputs) whose results alias nothing."""

    def __init__(self, layers: Sequence[nn.Module], undefined: frozenset[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.undefined = undefined
        self.layer: int | None = None

    def forward(self, key: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        # Clones, so that an in-place first layer changes nothing outside and no output is a view of an
        # input or of another output; lowering drops those that copy for nothing.
        value: object = tuple(x.clone() for x in inputs)
        if len(inputs) == 1:
            (value,) = value  # type: ignore[misc]
        mode = KeyedRandomMode(key)
        for index, layer in enumerate(self.layers):
            self.layer = index
            mode.enter_layer(index)
            held = _tensors(layer)
            with mode, aot.annotate({"layer": index}):
                value = layer(value)
            for name, tensor in _tensors(layer).items():
                if held.get(name) is not tensor:
                    raise _Refused(f"its forward replaces the buffer or parameter {name}, a side effect")
        self.layer = None
        outputs = (value,) if isinstance(value, Tensor) else value
        if not isinstance(outputs, tuple) or not all(isinstance(x, Tensor) for x in outputs):
            raise _Refused(f"the stage returns {_describe(value)}, not a tensor or a tuple of tensors")
        # An output whose gradient never comes must not enter the backward as a gradient of zeros.
        return tuple(x.detach().clone() if i in self.undefined else x.clone() for i, x in enumerate(outputs))


class _Refused(Exception):
    pass


def _tensors(layer: nn.Module) -> dict[str, Tensor | None]:
    return {
        f"{prefix}.{key}": tensor
        for prefix, module in layer.named_modules()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
    }


def _describe(value: object) -> str:
    if isinstance(value, tuple):
        return "a tuple of " + ", ".join(type(x).__name__ for x in value)
    return f"a {type(value).__name__}"


def parameters_of(layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of a stage, tied ones once, in the order of their ports."""
    return list({id(p): p for layer in layers for p in layer.parameters()}.values())


def buffers_of(layers: Iterable[nn.Module]) -> list[Tensor]:
    """The buffers of a stage, tied ones once, in the order of their ports."""
    return list({id(b): b for layer in layers for b in layer.buffers()}.values())


def trace(
    layers: Sequence[nn.Module], inputs: Sequence[Tensor], undefined: frozenset[int] = frozenset()
) -> Joint | Untraceable:
    """Traces one stage for inputs of the given shapes, dtypes, strides and need of gradients.

    With gradients enabled the graph holds forward and backward; under ``no_grad``, the forward alone, traced
    by itself because some layers then take another path.

    Args:
        layers: the stage's layers. They are left as they were.
        inputs: one micro-batch of the stage's input; only described, never read.
        undefined: outputs whose gradient nobody will supply.
    """
    refusal = _refuse_layers(layers)
    if refusal is not None:
        return refusal
    stage = _Stage(layers, undefined)
    key = torch.zeros(3, dtype=torch.int64)
    restore = snapshot(layers)
    failure: Untraceable | None = None
    module: fx.GraphModule | None = None
    example = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs)
    try:
        module = aot.export_joint(stage, (key, *example))
    except _Refused as refused:
        failure = Untraceable(stage.layer, str(refused))
    except UnkeyedRandomOp as error:
        failure = Untraceable(stage.layer, str(error))
    except Exception as error:
        failure = Untraceable(stage.layer, f"tracing raised {type(error).__name__}: {_first_line(error)}")
    finally:
        changed = restore()
    if failure is not None:
        return failure
    if changed:
        layer = int(changed[0].split(".")[0])
        return Untraceable(layer, f"its forward sets {changed[0].partition('.')[2]}, a side effect")
    assert module is not None
    return _refuse_graph(module) or _read(module, layers)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _refuse_layers(layers: Sequence[nn.Module]) -> Untraceable | None:
    """Layers known to trace unfaithfully, or whose effects a trace does not see."""
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            kind = type(module).__name__ + (f" {name}" if name else "")
            if isinstance(module, nn.RNNBase):
                return Untraceable(
                    index, f"{kind}: recurrent layers differ in bits when traced and unroll with the length"
                )
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
                return Untraceable(index, f"{kind}: max_norm changes a parameter in the forward")
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                return Untraceable(index, f"{kind}: sparse gradients")
            if isinstance(module, torch.jit.ScriptModule):
                return Untraceable(index, f"{kind}: a TorchScript module is opaque")
            for hook in _hooks(module):
                if not getattr(hook, "__module__", "").startswith("torch."):
                    return Untraceable(
                        index,
                        f"{kind}: the hook {getattr(hook, '__name__', hook)!s} would run once, while tracing",
                    )
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if nn.parameter.is_lazy(tensor):
                    return Untraceable(
                        index, f"{kind}: {key} is not initialised yet; run one batch through the module first"
                    )
                if tensor is not None and (
                    type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided
                ):
                    return Untraceable(
                        index, f"{kind}: {key} is a {type(tensor).__name__} of layout {tensor.layout}"
                    )
    return None


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hooks(module: nn.Module) -> list[object]:
    return [hook for table in _HOOKS for hook in vars(module).get(table, {}).values()]


def layer_of(node: fx.Node) -> int | None:
    """The layer, counted within the stage, that a node was traced from."""
    layer = (node.meta.get("custom") or {}).get("layer")
    return layer if isinstance(layer, int) else None


def _refuse_graph(module: fx.GraphModule) -> Untraceable | None:
    for node in module.graph.nodes:
        layer = layer_of(node)
        if node.op == "get_attr":
            value = getattr(module, str(node.target))
            if isinstance(value, Tensor) and (value.requires_grad or isinstance(value, nn.Parameter)):
                return Untraceable(
                    layer, "it uses a tensor that needs a gradient and is not one of its parameters"
                )
            if not isinstance(value, Tensor):
                return Untraceable(layer, f"it traces to a nested graph ({type(value).__name__})")
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        if _draws(node, node.target):
            return Untraceable(layer, f"{node.target} draws outside the forward of a layer")
        if not node.target._schema.returns:
            return Untraceable(layer, f"{node.target} returns nothing: it acts by a side effect")
        if node.target._schema.is_mutable:
            return Untraceable(
                layer, f"{node.target} changes a tensor that is neither a buffer nor made by the layer"
            )
    return None


def _draws(node: fx.Node, op: OpOverload[Any, Any]) -> bool:
    if op.namespace != "aten" or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = dict(zip((a.name for a in op._schema.arguments), node.args, strict=False)) | node.kwargs
    # Fused attention carries the tag for its dropout alone, which is 0 unless given.
    return bool(given.get("dropout_p", "dropout_p" not in (a.name for a in op._schema.arguments)))


def _read(module: fx.GraphModule, layers: Sequence[nn.Module]) -> Joint | Untraceable:
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
            case aot.PlainAOTOutput():
                return Port(Role.OUTPUT, desc.idx)
            case aot.InputMutationAOTOutput(mutated_input=aot.BufferAOTInput() as buffer):
                return Port(Role.BUFFER, buffers[buffer.target])
            case aot.GradAOTOutput(grad_of=aot.ParamAOTInput() as parameter):
                return Port(Role.PARAMETER_GRADIENT, parameters[parameter.target])
            case aot.GradAOTOutput(grad_of=aot.PlainAOTInput() as plain):
                return Port(Role.INPUT_GRADIENT, plain.idx - 1)
        raise _Refused(
            f"the trace has {desc}, which is neither a parameter, a buffer, an input nor their gradient"
        )

    *_, result = module.graph.nodes
    (results,) = result.args
    assert isinstance(results, (list, tuple))
    descriptors = result.meta["desc"]
    try:
        inputs = [Node(port(n.meta["desc"]), n) for n in module.graph.find_nodes(op="placeholder")]
        outputs = [
            Node(port(d), n) for n, d in zip(results, descriptors, strict=True) if isinstance(n, fx.Node)
        ]
    except _Refused as refused:
        return Untraceable(None, str(refused))
    return Joint(module, tuple(inputs), tuple(outputs), len(layers))
