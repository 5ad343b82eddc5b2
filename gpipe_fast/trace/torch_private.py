"""PyTorch's private ahead-of-time tracer; no other file calls it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import sympy  # type: ignore[import-untyped, unused-ignore]
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
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
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.traceback import annotate, preserve_node_meta

from gpipe_fast.trace.fake import RealLayouts

__all__ = [
    "BufferAOTInput",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "SymbolicInputs",
    "Symbols",
    "TangentAOTInput",
    "annotate",
    "export_joint",
    "graph_module",
]

_DECOMPOSITION_KEYS = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)
# Batch norm's Python kernel decomposes nothing: it calls the functional operator, which returns the new
# running statistics, and the trace needs them as results.
_KEPT_DECOMPOSITIONS = ("native_batch_norm",)


@contextlib.contextmanager
def without_python_decompositions() -> Iterator[None]:
    """Removes PyTorch's Python decompositions of composite operators.

    A trace would use them in place of the C++ kernels (upsampling, dropout, recurrent layers), and they round
    differently. Eager mode never uses them.
    """
    removed: list[tuple[OpOverload[Any, Any], dict[Any, Any]]] = []
    for packet in list(vars(torch.ops.aten).values()):
        if not isinstance(packet, OpOverloadPacket) or packet.__name__ in _KEPT_DECOMPOSITIONS:
            continue
        for overload in list(vars(packet).values()):
            if isinstance(overload, OpOverload):
                kernels = {k: overload.py_kernels[k] for k in _DECOMPOSITION_KEYS if k in overload.py_kernels}
                if kernels:
                    removed.append((overload, kernels))
    try:
        for overload, kernels in removed:
            for key in kernels:
                del overload.py_kernels[key]
            overload._dispatch_cache.clear()
        yield
    finally:
        for overload, kernels in removed:
            overload.py_kernels.update(kernels)
            overload._dispatch_cache.clear()


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
    aten = torch.ops.aten
    if training and running_mean is not None:
        found: tuple[Tensor, ...] = aten._batch_norm_with_update(
            input, weight, bias, running_mean, running_var, momentum, eps
        )
        return found
    # Without running statistics, or in eval mode, `cudnn_batch_norm` is functional.
    with _patched_cudnn_batch_norm(None):
        found = aten.cudnn_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)
    return found


@contextlib.contextmanager
def _patched_kernel(op: Any, key: Any, kernel: Callable[..., Any] | None) -> Iterator[None]:
    """Sets an operator's Python kernel for a dispatch key; None removes the present kernel."""
    before = op.py_kernels.pop(key, None)
    if kernel is not None:
        op.py_kernels[key] = kernel
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        op.py_kernels.pop(key, None)
        if before is not None:
            op.py_kernels[key] = before
        op._dispatch_cache.clear()


def _patched_cudnn_batch_norm(kernel: Callable[..., Any] | None) -> contextlib.AbstractContextManager[None]:
    """Sets the Python kernel of cuDNN's batch norm for a trace; None removes the present kernel."""
    op = torch.ops.aten.cudnn_batch_norm.default
    return _patched_kernel(op, torch._C.DispatchKey.Autograd, kernel)


@contextlib.contextmanager
def _replaced_attention(attention: Callable[..., Tensor | None]) -> Iterator[None]:
    """Replaces ``scaled_dot_product_attention`` in a trace, except where the replacement returns None."""
    op = torch.ops.aten.scaled_dot_product_attention.default
    key = torch._C.DispatchKey.AutogradCUDA

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        found = attention(*args, **kwargs)
        if found is None:
            with _patched_kernel(op, key, None):
                found = op(*args, **kwargs)
        result: Tensor = found
        return result

    with _patched_kernel(op, key, kernel):
        yield


@contextlib.contextmanager
def _patched_reserve_size() -> Iterator[None]:
    # cuDNN reports the size of the reserve space that its batch norm saves for the backward only for integer
    # sizes, not for symbols, and only on a GPU. Programs accept a reserve space of any size.
    name = "_get_cudnn_batch_norm_reserve_space_size"
    original = getattr(torch._C, name, None)
    setattr(torch._C, name, lambda input, training: 0)
    try:
        yield
    finally:
        if original is None:  # CPU-only builds may lack the function
            delattr(torch._C, name)
        else:
            setattr(torch._C, name, original)


@contextlib.contextmanager
def _allow_fused_attention() -> Iterator[None]:
    # In inference nn.MultiheadAttention calls one fused operator, but not if it detects a trace.
    module = torch.nn.modules.activation
    original_check = module._is_make_fx_tracing
    module._is_make_fx_tracing = lambda: False
    try:
        yield
    finally:
        module._is_make_fx_tracing = original_check


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


@dataclass(frozen=True)
class Symbols:
    """The symbols of a trace.

    Attributes:
        sizes: the sizes of each input: symbols or numbers.
        strides: the strides of each input: symbols or numbers, or None where they follow from the sizes.
        guards: conditions on the symbols; where they hold, a new trace would give the same graph.
        ranges: the smallest and the largest value of each symbol.
    """

    sizes: tuple[tuple[sympy.Symbol | int | None, ...], ...]
    strides: tuple[tuple[sympy.Symbol | int | None, ...], ...]
    guards: tuple[sympy.Basic, ...]
    ranges: dict[sympy.Symbol, tuple[int, float]]

    def solve(
        self, shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]]
    ) -> dict[sympy.Symbol, int] | None:
        """Returns the symbols' values for inputs of these shapes and strides; None if the guards fail."""
        values: dict[sympy.Symbol, int] = {}
        own = chain(chain.from_iterable(self.sizes), chain.from_iterable(self.strides))
        given = chain(chain.from_iterable(shapes), chain.from_iterable(strides))
        for symbol, value in zip(own, given, strict=True):
            known = symbol if isinstance(symbol, int) else value
            if isinstance(symbol, sympy.Symbol):
                known = values.setdefault(symbol, value)
            if known != value:
                return None
        for symbol, (least, most) in self.ranges.items():
            if symbol not in values or not least <= values[symbol] <= most:
                return None
        replaced = {symbol: sympy.Integer(value) for symbol, value in values.items()}
        holds = all(guard.xreplace(replaced) == sympy.true for guard in self.guards)
        return values if holds else None


class SymbolicInputs:
    """Fake inputs with symbols for some sizes.

    Attributes:
        mode: the fake mode.
        inputs: the inputs.
    """

    def __init__(self, inputs: Sequence[Tensor], varying: Sequence[Sequence[bool]]) -> None:
        self._env = ShapeEnv()
        self.mode = RealLayouts(self._env)
        self.inputs = tuple(map(self._fake, range(len(inputs)), inputs, varying))
        self._sizes = tuple(tuple(map(_symbol, fake.shape)) for fake in self.inputs)
        self._strides = tuple(tuple(map(_symbol, fake.stride())) for fake in self.inputs)

    def _fake(self, index: int, tensor: Tensor, varying: Sequence[bool]) -> Tensor:
        if not tensor.dim():  # PyTorch would make the element of an integer a symbol, too
            with self.mode:
                scalar = torch.empty((), dtype=tensor.dtype, device=tensor.device)
            return scalar.requires_grad_(tensor.requires_grad)
        return self.mode.from_tensor(
            tensor,
            static_shapes=False,
            source=ConstantSource(f"input_{index}"),
            symbolic_context=StatelessSymbolicContext(
                [DimDynamic.DUCK if varies else DimDynamic.STATIC for varies in varying]
            ),
        )

    def symbols(self) -> Symbols | None:
        """Returns the symbols and their guards after the trace; None if a size depends on data."""
        env = self._env
        known = set(chain.from_iterable(self._sizes + self._strides))
        if env.deferred_runtime_asserts or not set(env.var_to_range) <= known:
            return None
        ranges = {s: (int(r.lower), float(r.upper)) for s, r in env.var_to_range.items()}
        return Symbols(self._sizes, self._strides, tuple(guard.expr for guard in env.guards), ranges)


def _symbol(size: int | torch.SymInt) -> sympy.Symbol | int | None:
    if isinstance(size, torch.SymInt):
        return size.node.expr if isinstance(size.node.expr, sympy.Symbol) else None
    return size


def export_joint(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    mode: FakeTensorMode | None = None,
    attention: Callable[..., Tensor | None] | None = None,
) -> fx.GraphModule:
    """Traces ``module(*inputs)`` and, if gradients are enabled and required, the backward.

    Args:
        module: called once, on fake tensors with the shapes, dtypes and strides of ``inputs``.
        inputs: real tensors, whose contents are never read, or fake tensors of ``mode``.
        mode: the fake mode; a new `RealLayouts` by default.
        attention: replaces ``scaled_dot_product_attention``, unless it returns None.

    Returns:
        A flat functional ATen graph whose placeholders and results carry ``meta['desc']``.
    """
    context = TracingContext(mode or RealLayouts())
    with (
        contextlib.ExitStack() as stack,
        _use_lazy_graph_module(True),
        preserve_node_meta(),
        tracing(context),
        without_python_decompositions(),
        _patched_cudnn_batch_norm(_cudnn_batch_norm),
        _patched_reserve_size(),
        _allow_fused_attention(),
        _autocast_cache_disabled(),
        _anomalies_ignored(),
        contextlib.nullcontext() if attention is None else _replaced_attention(attention),
        # loss.backward() runs outside the autocast region of the forward.
        functorch_config.patch(backward_pass_autocast="off"),
    ):
        # The metadata mode only records names, but like any function mode it would keep
        # nn.MultiheadAttention from its fused operator.
        joint = aot_export_joint_with_descriptors(stack, module, inputs, _disable_torch_fn_metadata_mode=True)
        traced: fx.GraphModule = joint.graph_module
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


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Returns a graph module whose code is generated lazily, at its first call."""
    with _use_lazy_graph_module(True):
        made: fx.GraphModule = _make_graph_module(root, graph)
    return made
