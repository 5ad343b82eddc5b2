"""What cannot be traced faithfully, before and after the tracing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload


@dataclass(frozen=True)
class Untraceable:
    """A stage that cannot be traced faithfully.

    Attributes:
        layer: index of the layer within the stage, or None when no single layer is to blame.
        reason: what stands in the way, one sentence without a full stop.
        final: whether the layer cannot run in a pipeline at all.
        error: what to raise where the layer does not run in Python instead.
    """

    layer: int | None
    reason: str
    final: bool = False
    error: type[Exception] = RuntimeError


def refuse_uninitialised(layers: Sequence[nn.Module]) -> Untraceable | None:
    """Layers whose parameters are made by their first call."""
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if nn.parameter.is_lazy(tensor):
                    return Untraceable(
                        index,
                        f"{_kind(module, name)}: {key} is not initialised yet; run one batch through the "
                        "module first",
                        final=True,
                    )
    return None


def _kind(module: nn.Module, name: str) -> str:
    return type(module).__name__ + (f" {name}" if name else "")


def refuse_layers(layers: Sequence[nn.Module]) -> Untraceable | None:
    """Layers known to trace unfaithfully, or whose effects a trace does not see."""
    uninitialised = refuse_uninitialised(layers)
    if uninitialised is not None:
        return uninitialised
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            kind = _kind(module, name)
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


def refuse_graph(module: fx.GraphModule) -> Untraceable | None:
    """What a finished trace shows that lowering it would get wrong."""
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
