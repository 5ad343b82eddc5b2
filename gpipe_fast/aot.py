"""The one place that calls PyTorch's private ahead-of-time tracer and its min-cut partitioner."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx.traceback import annotate, preserve_node_meta

from gpipe_fast.fake import RealLayouts

__all__ = [
    "BufferAOTInput",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "annotate",
    "export_joint",
    "min_cut_saved",
]

_PYTHON_KERNELS = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)
# Batch norm's Python kernel computes nothing: it names the functional operator, whose new running
# statistics the trace must see as results.
_KEPT = ("native_batch_norm", "cudnn_batch_norm")


@contextlib.contextmanager
def without_python_decompositions() -> Iterator[None]:
    """Takes PyTorch's Python re-implementations of composite operators away.

    While tracing they would stand in for the C++ ones (upsampling, dropout, recurrent layers) and round
    differently; eager mode never uses them.
    """
    taken: list[tuple[OpOverload[Any, Any], dict[Any, Any]]] = []
    for packet in list(vars(torch.ops.aten).values()):
        if not isinstance(packet, OpOverloadPacket) or packet.__name__ in _KEPT:
            continue
        for overload in list(vars(packet).values()):
            if isinstance(overload, OpOverload):
                kernels = {k: overload.py_kernels[k] for k in _PYTHON_KERNELS if k in overload.py_kernels}
                if kernels:
                    taken.append((overload, kernels))
    try:
        for overload, kernels in taken:
            for key in kernels:
                del overload.py_kernels[key]
            overload._dispatch_cache.clear()
        yield
    finally:
        for overload, kernels in taken:
            overload.py_kernels.update(kernels)
            overload._dispatch_cache.clear()


@contextlib.contextmanager
def _fast_attention() -> Iterator[None]:
    # In inference nn.MultiheadAttention calls one fused operator, unless it notices that it is traced.
    module = torch.nn.modules.activation
    noticing = module._is_make_fx_tracing
    module._is_make_fx_tracing = lambda: False
    try:
        yield
    finally:
        module._is_make_fx_tracing = noticing


@contextlib.contextmanager
def _uncached_autocast() -> Iterator[None]:
    # A cached cast of a weight is shared by every use within one autocast region, and so would be its
    # gradient: a loop without the cache, which is what a pipeline computes, gives other numbers.
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def export_joint(module: nn.Module, inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    """Traces ``module(*inputs)`` and, where gradients are enabled and asked for, its backward.

    Args:
        module: called once, on fake tensors of the shapes, dtypes and strides of ``inputs``.
        inputs: real tensors; they are only described, never read.

    Returns:
        A flat functional ATen graph whose placeholders and results carry ``meta['desc']``.
    """
    context = TracingContext(RealLayouts())
    with (
        contextlib.ExitStack() as stack,
        preserve_node_meta(),
        tracing(context),
        without_python_decompositions(),
        _fast_attention(),
        _uncached_autocast(),
        # loss.backward() runs outside the autocast region of the forward.
        functorch_config.patch(backward_pass_autocast="off"),
    ):
        # A function mode, which would only note names, keeps nn.MultiheadAttention from its fused operator.
        joint = aot_export_joint_with_descriptors(stack, module, inputs, _disable_torch_fn_metadata_mode=True)
        graph_module: fx.GraphModule = joint.graph_module
    return graph_module


def min_cut_saved(joint: fx.GraphModule, num_forward_outputs: int, budget: float) -> set[str]:
    """Names of the forward nodes that a min-cut at the given activation memory budget saves.

    Args:
        joint: placeholders named ``primals_*`` and ``tangents_*``.
        num_forward_outputs: results of the joint graph that belong to the forward.
        budget: 0 saves only inputs, 1 whatever saves most time (``activation_memory_budget``).
    """
    clone = copy.deepcopy(joint)
    with functorch_config.patch(activation_memory_budget=budget):
        forward, _ = min_cut_rematerialization_partition(clone, (), num_fwd_outputs=num_forward_outputs)
    (results,) = next(iter(reversed(forward.graph.nodes))).args
    assert isinstance(results, (list, tuple))
    return {node.name for node in results[num_forward_outputs:] if isinstance(node, fx.Node)}
