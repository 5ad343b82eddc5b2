"""Operators: their classes, the keys and kernels of the dispatcher, and PyTorch's Python decompositions.

Read in PyTorch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import Argument, DispatchKey
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

_DECOMPOSITION_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
# Batch norm's Python kernel decomposes nothing: it calls the functional operator, which returns the new
# running statistics, and the trace needs them as results.
_KEPT_DECOMPOSITIONS = ("native_batch_norm",)

# Returns whether an operator has a kernel for a dispatch key; both are given by name.
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def foreach_norm(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Returns the norm of each tensor, as gradient clipping computes it."""
    return torch._foreach_norm(tensors)


def call_composite(op: OpOverload[Any, Any], *args: Any, **kwargs: Any) -> Any:
    """Calls an operator's implementation in C++ by other operators."""
    return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


# Their results alias the argument although the schema does not say so; LSTM and GRU cells use them.
_UNDECLARED_VIEWS = frozenset(
    {torch.ops.aten.unsafe_split.Tensor, torch.ops.aten.unsafe_split_with_sizes.default}
)


def is_view_op(op: OpOverload[Any, Any]) -> bool:
    """Returns whether the operator's result aliases its first argument."""
    schema = op._schema
    declared = not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
    return declared or op in _UNDECLARED_VIEWS


def function_names() -> list[str]:
    """Returns the names of the functions that ``torch`` defines in C++."""
    return dir(torch._C._VariableFunctions)


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


@contextlib.contextmanager
def patched_kernel(op: Any, key: Any, kernel: Callable[..., Any] | None) -> Iterator[None]:
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
