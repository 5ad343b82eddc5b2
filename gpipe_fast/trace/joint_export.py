"""The joint export: traces a module to one graph of its forward and backward, of ATen operators."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from gpipe_fast.torch_private import aot
from gpipe_fast.torch_private.dynamo import compile_lock
from gpipe_fast.torch_private.fake_tensors import FunctionalTensorMode
from gpipe_fast.torch_private.graphs import preserve_node_meta, use_lazy_graph_module
from gpipe_fast.torch_private.operators import DispatchKey, patched_kernel, without_python_decompositions
from gpipe_fast.trace.fake import RealLayouts

aten = torch.ops.aten

# The key in the meta of a graph for the placements of sharded parameters' gradients, by the parameter's name.
PLACEMENTS = "gpipe_fast_gradient_placements"


def _cudnn_batch_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Calls cuDNN's batch norm by operators whose schemas declare that the running statistics change.

    The schema of `cudnn_batch_norm` does not declare this, so that a trace would lose the new statistics.
    PyTorch's Python decomposition calls the native kernel, which rounds differently. The operator called here
    instead selects its kernel at run time, with the function that eager mode uses
    (`_select_batch_norm_backend`); so does the operator's backward.
    """
    if training and running_mean is not None:
        found: tuple[Tensor, ...] = aten._batch_norm_with_update(
            input, weight, bias, running_mean, running_var, momentum, eps
        )
        return found
    # Without running statistics, or in eval mode, `cudnn_batch_norm` is functional.
    with _patched_cudnn_batch_norm(None):
        found = aten.cudnn_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)
    return found


def _patched_cudnn_batch_norm(kernel: Callable[..., Any] | None) -> contextlib.AbstractContextManager[None]:
    """Sets the Python kernel of cuDNN's batch norm for a trace; None removes the present kernel."""
    op = torch.ops.aten.cudnn_batch_norm.default
    return patched_kernel(op, DispatchKey.Autograd, kernel)


@contextlib.contextmanager
def _replaced_attention(attention: Callable[..., Tensor | None]) -> Iterator[None]:
    """Replaces ``scaled_dot_product_attention`` in a trace, except where the replacement returns None."""
    op = torch.ops.aten.scaled_dot_product_attention.default
    key = DispatchKey.AutogradCUDA

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        found = attention(*args, **kwargs)
        if found is None:
            with patched_kernel(op, key, None):
                found = op(*args, **kwargs)
        result: Tensor = found
        return result

    with patched_kernel(op, key, kernel):
        yield


@contextlib.contextmanager
def _autocast_cache_disabled() -> Iterator[None]:
    # With the cache, all uses of a weight within one autocast region share one cast, and its gradient. A
    # pipeline computes the bits of a loop without the cache, which differ.
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextlib.contextmanager
def _exact_changes(mode: RealLayouts) -> Iterator[None]:
    """Makes functionalization follow changes in place exactly, in a block.

    To an expanded tensor, it adds the difference of the new and the old value, and it sets to zero what no
    window of ``unfold`` contains: both become other views here. A tensor that is no view, but has gaps, such
    as a gate of a GRU cell, gets another layout.

    Args:
        mode: the fake mode; of the trace.
    """
    functionalize = FunctionalTensorMode.__torch_dispatch__

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changes_sizes = torch.Tag.inplace_view in func.tags  # such as transpose_, which has other strides
        outer, mode.in_place = mode.in_place, "" if changes_sizes else func._schema.name
        try:
            found = functionalize(self, func, types, args, kwargs)
        finally:
            mode.in_place = outer
        if found is NotImplemented:  # a tensor of another class, as a DTensor, dispatches first
            return found
        if func is aten.expand.default and found.numel() == args[0].numel():
            return functionalize(self, aten.view.default, types, (args[0], found.shape))
        if func is aten.unfold.default:
            where = found.shape, found.stride(), found.storage_offset()
            return functionalize(self, aten.as_strided.default, types, (args[0], *where))
        return found

    with mock.patch.object(FunctionalTensorMode, "__torch_dispatch__", dispatch):
        yield


def export_joint(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    mode: RealLayouts,
    attention: Callable[..., Tensor | None] | None,
) -> fx.GraphModule:
    """Traces ``module(*inputs)`` and, if gradients are enabled and required, the backward.

    Args:
        module: called once, on fake tensors with the shapes, dtypes and strides of ``inputs``.
        inputs: fake tensors of ``mode``.
        mode: the fake mode.
        attention: replaces ``scaled_dot_product_attention``, unless it returns None.

    Returns:
        A flat functional ATen graph whose placeholders and results carry ``meta['desc']``. Its own ``meta``
        has the placements of gradients, under `PLACEMENTS`.
    """
    with (
        compile_lock,  # one trace at a time has its patches
        contextlib.ExitStack() as stack,
        use_lazy_graph_module(True),
        preserve_node_meta(),
        aot.tracing(aot.TracingContext(mode)),
        without_python_decompositions(),
        _exact_changes(mode),
        _patched_cudnn_batch_norm(_cudnn_batch_norm),
        aot.patched_reserve_size(),
        aot.fused_attention_allowed(),
        _autocast_cache_disabled(),
        _anomalies_ignored(),
        contextlib.nullcontext() if attention is None else _replaced_attention(attention),
        aot.backward_without_autocast(),  # as loss.backward() runs
    ):
        # The metadata mode only records names, but like any function mode it would keep
        # nn.MultiheadAttention from its fused operator.
        joint = aot.aot_export_joint_with_descriptors(
            stack, module, inputs, _disable_torch_fn_metadata_mode=True
        )
        traced: fx.GraphModule = joint.graph_module
        traced.meta[PLACEMENTS] = aot.gradient_placements(joint)
    return traced


@contextlib.contextmanager
def _anomalies_ignored() -> Iterator[None]:
    """Ignores reports of backwards that cannot be traced: PyTorch turns anomaly mode on for a trace."""
    if torch.is_anomaly_enabled():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error detected in ")
        yield
