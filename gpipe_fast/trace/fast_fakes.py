"""Fake results of frequent operators for dense arguments, computed from shapes alone.

PyTorch computes them by decompositions in Python: a batch norm takes it fifteen other operators, and a
millisecond. For the arguments that the rules here accept, results are contiguous.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpipe_fast.torch_private.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    from_meta,
    in_kernel_invocation_manager,
)

aten = torch.ops.aten


class _Result(NamedTuple):
    shape: Sequence[int]
    dtype: torch.dtype


_Results = tuple[_Result, ...]


def fast_fake(mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Returns the fake results of an operator; None if no rule holds for its arguments."""
    rule = _RULES.get(func)
    if rule is None or kwargs:
        return None
    if func is aten.slice.Tensor:
        return _slice(mode, *args)
    tensors = [a for a in args if isinstance(a, Tensor)]
    if not all(_is_plain(tensor, mode) for tensor in tensors) or len({t.dtype for t in tensors}) != 1:
        return None
    results = rule(*args)
    if results is None:
        return None
    device = tensors[0].device
    fakes = tuple(_fake(mode, result, device) for result in results)
    return fakes if len(func._schema.returns) > 1 else fakes[0]


def _is_plain(tensor: Tensor, mode: FakeTensorMode) -> bool:
    """Returns whether a tensor is a fake one of this mode with numbers for sizes, in float32 on the CPU."""
    return (
        isinstance(tensor, FakeTensor)
        and tensor.fake_mode is mode
        and tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
        and all(type(size) is int for size in tensor.shape)
    )


def _fake(mode: FakeTensorMode, result: _Result, device: torch.device) -> Tensor:
    meta = torch.empty(result.shape, dtype=result.dtype, device="meta")
    return from_meta(mode, meta, device)


def _slice(
    mode: FakeTensorMode, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    """Returns a view of a tensor; None unless the bounds lie within it."""
    if not _is_plain(x, mode) or type(start) is not int or type(end) is not int or step != 1 or x.dim() == 0:
        return None
    end = min(end, x.shape[dim])
    if not 0 <= start <= end:
        return None
    shape = list(x.shape)
    shape[dim] = end - start
    with in_kernel_invocation_manager(mode):
        meta = x.as_strided(shape, x.stride(), x.storage_offset() + start * x.stride(dim))
    return from_meta(mode, meta, x.device)


def _is_ordered(tensor: Tensor) -> bool:
    """Returns whether strides decrease, and no size is one: results of such operands are contiguous."""
    strides = tensor.stride()
    return min(tensor.shape, default=0) > 1 and all(a > b > 0 for a, b in itertools.pairwise(strides))


def _is_dense(tensor: Tensor) -> bool:
    return _is_ordered(tensor) and tensor.is_contiguous()


def _unary(x: Tensor, *_: Any) -> _Results | None:
    return (_Result(x.shape, x.dtype),) if _is_dense(x) else None


def _binary(a: Any, b: Any, *_: Any) -> _Results | None:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
        return None
    return (_Result(a.shape, a.dtype),) if _is_ordered(a) and _is_ordered(b) else None


def _batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *_: Any
) -> _Results | None:
    if not training or not _is_dense(x) or x.dim() < 3:
        return None
    channels = _Result((x.shape[1],), x.dtype)
    return (_Result(x.shape, x.dtype), channels, channels, channels, channels)


def _batch_norm_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Any,
    mean: Any,
    variance: Any,
    saved_mean: Any,
    saved_rstd: Any,
    training: bool,
    eps: float,
    mask: Sequence[bool],
) -> _Results | None:
    if not training or not all(mask) or weight is None or not _is_dense(x) or not _is_dense(gradient):
        return None
    channels = _Result((x.shape[1],), x.dtype)
    return (_Result(x.shape, x.dtype), channels, channels)


_RULES: dict[Any, Callable[..., _Results | None]] = {
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.add.Tensor: _binary,
    aten.mul.Tensor: _binary,
    aten.relu.default: _unary,
    aten.gelu.default: _unary,
    aten.silu.default: _unary,
    aten.threshold_backward.default: _binary,
    aten.slice.Tensor: _unary,
}
