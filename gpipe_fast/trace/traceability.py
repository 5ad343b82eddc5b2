"""Checks, before and after a trace, that the trace is faithful."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from gpipe_fast.layers.quantized import is_quantized
from gpipe_fast.layers.sharded import is_sharded
from gpipe_fast.strides import share_memory
from gpipe_fast.torch_private.operators import OpOverload
from gpipe_fast.trace.collectives import is_collective, is_wait, unsupported
from gpipe_fast.trace.fake import real_arguments
from gpipe_fast.trace.joint_graph import GraphRole, JointGraph, buffers_of
from gpipe_fast.user_warning import warn_user


class Untraceable(Exception):
    """Raised where a stage cannot be traced faithfully.

    Attributes:
        layer: index of the layer within the stage, or None if no single layer is the cause.
        reason: the reason, one sentence without a full stop.
        is_fatal: whether the layer cannot run in a pipeline at all, not even in Python.
        error: the exception to raise if the layer must not run in Python instead.
        stage: index of the stage, once it is known.
    """

    def __init__(
        self,
        layer: int | None,
        reason: str,
        is_fatal: bool = False,
        error: type[Exception] = RuntimeError,
    ) -> None:
        super().__init__(reason)
        self.layer, self.reason, self.is_fatal, self.error = layer, reason, is_fatal, error
        self.stage = 0


class UsesForeignTensor(Untraceable):
    """Raised for layers that use a parameter of another layer or of none."""


def check_can_run(layers: Sequence[nn.Module]) -> None:
    """Checks that a pipeline can run the layers, at least in Python.

    Raises:
        Untraceable: it cannot; the reason is fatal.
    """
    _check_initialized(layers)
    _check_frozen(layers)


def _check_initialized(layers: Sequence[nn.Module]) -> None:
    """Checks that no layer has lazy parameters or buffers, which its first call initialises."""
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if nn.parameter.is_lazy(tensor):
                    raise Untraceable(
                        index,
                        f"{_module_label(module, name)}: {key} is not initialised yet; run one batch through "
                        "the module first",
                        is_fatal=True,
                    )


def _check_frozen(layers: Sequence[nn.Module]) -> None:
    """Checks that no quantized parameter requires a gradient."""
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad and is_quantized(parameter):
                raise Untraceable(
                    index,
                    f"{name} is quantized ({type(parameter).__name__}) and requires a gradient, but stages "
                    "train no quantized weights; call requires_grad_(False) on it, and train adapters, or "
                    "load the model without quantization",
                    is_fatal=True,
                    error=ValueError,
                )


def _module_label(module: nn.Module, name: str) -> str:
    return type(module).__name__ + (f" {name}" if name else "")


def check_layers(layers: Sequence[nn.Module]) -> None:
    """Checks layers for modules that trace unfaithfully, or with side effects that a trace does not record.

    Raises:
        Untraceable: there is such a module.
    """
    check_can_run(layers)
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            kind = _module_label(module, name)
            if isinstance(module, nn.RNNBase):
                raise Untraceable(
                    index,
                    f"{kind}: recurrent layers are not bitwise equal when traced, and unroll with the length",
                )
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
                raise Untraceable(index, f"{kind}: max_norm changes a parameter in forward")
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                raise Untraceable(index, f"{kind}: it has sparse gradients")
            if isinstance(module, torch.jit.ScriptModule):
                raise Untraceable(index, f"{kind}: a TorchScript module is opaque")
            for hook in _hooks(module):
                if not getattr(hook, "__module__", "").startswith(("torch.", "gpipe_fast.")):
                    raise Untraceable(
                        index,
                        f"{kind}: the hook {getattr(hook, '__name__', hook)!s} would run only in the trace",
                    )
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                is_known = (
                    tensor is None
                    or type(tensor) in (Tensor, nn.Parameter)
                    or is_quantized(tensor)
                    or is_sharded(tensor)
                )
                if not is_known or (tensor is not None and tensor.layout is not torch.strided):
                    raise Untraceable(
                        index, f"{kind}: {key} is a {type(tensor).__name__} of layout {tensor.layout}"
                    )


# The tables of a module's hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hooks(module: nn.Module) -> list[object]:
    return [hook for table in HOOKS for hook in vars(module).get(table, {}).values()]


def layer_of(node: fx.Node) -> int | None:
    """Returns the index within the stage of the layer from which a node was traced; None if there is none."""
    layer = (node.meta.get("custom") or {}).get("layer")
    return layer if isinstance(layer, int) else None


def check_graph(module: fx.GraphModule) -> None:
    """Checks a finished trace for nodes that a lowered program would compute wrongly.

    Raises:
        Untraceable: there is such a node.
    """
    for node in module.graph.nodes:
        layer = layer_of(node)
        if node.op == "get_attr":
            value = getattr(module, str(node.target))
            if isinstance(value, Tensor) and (value.requires_grad or isinstance(value, nn.Parameter)):
                raise UsesForeignTensor(
                    layer, "it uses a tensor that requires a gradient but is not one of its parameters"
                )
            if not isinstance(value, Tensor):
                raise Untraceable(layer, f"it traces to a nested graph ({type(value).__name__})")
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        if node.target is torch.ops.aten._efficientzerotensor.default:
            raise Untraceable(layer, "forward-mode AD makes a tensor of zeros without memory")
        refused = unsupported(node)
        if refused is not None:
            raise Untraceable(layer, refused)
        if _draws(node, node.target):
            raise Untraceable(layer, f"{node.target} draws random numbers outside a layer's forward")
        if not node.target._schema.returns:
            raise Untraceable(layer, f"{node.target} returns nothing, so that it must have a side effect")
        if node.target._schema.is_mutable:
            raise Untraceable(
                layer, f"{node.target} changes a tensor that is neither a buffer nor created by the layer"
            )


def check_constants(joint: JointGraph, layers: Sequence[nn.Module]) -> None:
    """Checks that no constant is in the memory of a buffer that the graph writes: it would miss the write.

    Raises:
        Untraceable: there is such a constant.
    """
    buffers = buffers_of(layers)
    written = [buffers[n.port.index] for n in joint.outputs if n.port.role is GraphRole.BUFFER]
    for node in joint.module.graph.find_nodes(op="get_attr") if written else ():
        constant = getattr(joint.module, str(node.target))
        if any(share_memory(constant, buffer) for buffer in written):
            raise Untraceable(layer_of(node), "it refers to the memory of a buffer that the stage writes")


def _draws(node: fx.Node, op: OpOverload[Any, Any]) -> bool:
    if op.namespace != "aten" or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = dict(zip((a.name for a in op._schema.arguments), node.args, strict=False)) | node.kwargs
    # Fused attention has the tag only for its dropout, whose probability is 0 by default.
    return bool(given.get("dropout_p", "dropout_p" not in (a.name for a in op._schema.arguments)))


def warn_of_autocast(module: fx.GraphModule) -> None:
    """Warns of operators of other libraries whose kernels call operators that autocast would cast.

    A trace contains the casts only of operators that layers call, and programs run without autocast.
    """
    for node in module.graph.nodes:
        fake = node.meta.get("val")
        if not isinstance(node.target, OpOverload) or not isinstance(fake, Tensor):
            continue
        dtype = _dtype_under_autocast(node, node.target, fake)
        if dtype is not None and dtype != fake.dtype:
            warn_user(
                f"{node.target} computes in {fake.dtype} here, as its layer asks for, but under autocast "
                f"PyTorch would cast to {dtype} inside of it; for equal numbers, let the layer compute in "
                f"{dtype}, as by bnb_4bit_compute_dtype"
            )
            return


def _dtype_under_autocast(node: fx.Node, op: OpOverload[Any, Any], fake: Tensor) -> torch.dtype | None:
    """Returns the dtype in which an operator of another library returns its result; None if not known."""
    if op.namespace in ("aten", "prims", "gpipe_fast") or is_collective(node) or is_wait(node):
        return None
    if node.meta.get("partitioner_tag") == "is_backward":
        return None
    if not torch.is_autocast_enabled(fake.device.type):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    try:
        with torch.no_grad():
            real = op(*real_arguments(args), **real_arguments(kwargs))
    except Exception:  # zeros need not be valid arguments, and the device need not be there
        return None
    return real.dtype if isinstance(real, Tensor) else None
