"""Operators that reduce rows, in values that a region computes: norms, softmax, sums, means.

Everything between an operator's arguments and its results is in fp32, as in PyTorch's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpipe_fast.fuse.regions.operators import FLOATS, Arguments, Unsupported, literal
from gpipe_fast.fuse.regions.values import Mapped, Reduced, Value, View

aten = torch.ops.aten
# The dtype of values in between.
WIDE = torch.float32

# The results of an operator; None for one that is not computed.
Results = Sequence[Value | None]


def is_composite(target: Any) -> bool:
    """Returns whether an operator is one of this file's."""
    return target in _COMPOSITES


def expand(target: Any, arguments: Arguments, results: Sequence[Tensor | None]) -> Results:
    """Returns the values of an operator's results.

    Args:
        target: the operator.
        arguments: its arguments, with values in place of nodes.
        results: its results, of which shapes and dtypes are read.

    Raises:
        Unsupported: a region cannot compute it with these arguments.
    """
    if any(t is not None and t.dtype not in FLOATS for t in results):
        raise Unsupported
    return _COMPOSITES[target](arguments, results)


def _map(template: str, *operands: Value) -> Value:
    shape = torch.broadcast_shapes(*(o.shape for o in operands))
    return Mapped(tuple(shape), WIDE, template, operands)


def _reduce(operation: str, operand: Value, dims: Sequence[int]) -> Value:
    if operand.dtype not in FLOATS:
        raise Unsupported
    dims = tuple(sorted(d % len(operand.shape) for d in dims))
    shape = tuple(1 if d in dims else size for d, size in enumerate(operand.shape))
    return Reduced(shape, WIDE, operation, operand, dims)


def _mean(operand: Value, dims: Sequence[int]) -> Value:
    count = math.prod(operand.shape[d] for d in dims)
    return _map(f"{{0}} * {literal(float(torch.tensor(1.0) / count))}", _reduce("sum", operand, dims))


def _as(result: Tensor | None, value: Value) -> Value | None:
    """Returns a result: the value in the result's shape, rounded to its dtype."""
    if result is None:
        return None
    shape = tuple(result.shape)
    if isinstance(value, Reduced) and value.dtype != result.dtype:
        value = Reduced(value.shape, result.dtype, value.operation, value.operand, value.dims)
    elif value.dtype != result.dtype:
        value = Mapped(value.shape, result.dtype, "{0}", (value,))
    return value if value.shape == shape else View(shape, value.dtype, value)


def _dims(arguments: Arguments, operand: Value) -> tuple[int, ...]:
    given = arguments.get("dim")
    rank = len(operand.shape)
    if given is None or given == []:
        return tuple(range(rank))
    return tuple(d % rank for d in ([given] if isinstance(given, int) else given))


def _last(x: Value, arguments: Arguments) -> tuple[int, ...]:
    rank = len(x.shape)
    return tuple(range(rank - len(arguments["normalized_shape"]), rank))


def _sum(arguments: Arguments, results: Sequence[Tensor | None]) -> Results:
    x = arguments["self"]
    return [_as(results[0], _reduce("sum", x, _dims(arguments, x)))]


def _mean_of(arguments: Arguments, results: Sequence[Tensor | None]) -> Results:
    x = arguments["self"]
    return [_as(results[0], _mean(x, _dims(arguments, x)))]


def _layer_norm(arguments: Arguments, results: Sequence[Tensor | None]) -> Results:
    x, weight, bias = arguments["input"], arguments.get("weight"), arguments.get("bias")
    dims = _last(x, arguments)
    mean = _mean(x, dims)
    centered = _map("{0} - {1}", x, mean)
    variance = _mean(_map("{0} * {0}", centered), dims)
    rstd = _map(f"tl.rsqrt({{0}} + {literal(arguments['eps'])})", variance)
    y = _map("{0} * {1}", centered, rstd)
    y = y if weight is None else _map("{0} * {1}", y, weight)
    y = y if bias is None else _map("{0} + {1}", y, bias)
    values = (y, mean, rstd)
    return [_as(result, value) for result, value in zip(results, values, strict=True)]


def _layer_norm_backward(arguments: Arguments, results: Sequence[Tensor | None]) -> Results:
    g, x, mean, rstd = (arguments[name] for name in ("grad_out", "input", "mean", "rstd"))
    weight = arguments.get("weight")
    dims, rows = _last(x, arguments), _rows(x, arguments)
    y = _map("({0} - {1}) * {2}", x, mean, rstd)
    found: list[Value | None] = [None, None, None]
    if results[0] is not None:
        dy = g if weight is None else _map("{0} * {1}", g, weight)
        total, along = _mean(dy, dims), _mean(_map("{0} * {1}", dy, y), dims)
        found[0] = _as(results[0], _map("({0} - {1} - {2} * {3}) * {4}", dy, total, y, along, rstd))
    if results[1] is not None:
        found[1] = _as(results[1], _reduce("sum", _map("{0} * {1}", g, y), rows))
    if results[2] is not None:
        found[2] = _as(results[2], _reduce("sum", g, rows))
    return found


def _rows(x: Value, arguments: Arguments) -> tuple[int, ...]:
    return tuple(range(len(x.shape) - len(arguments["normalized_shape"])))


def _rms_norm(arguments: Arguments, results: Sequence[Tensor | None]) -> Results:
    x, weight, eps = arguments["input"], arguments.get("weight"), arguments.get("eps")
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    square = _mean(_map("{0} * {0}", x), _last(x, arguments))
    rstd = _map(f"tl.rsqrt({{0}} + {literal(eps)})", square)
    y = _map("{0} * {1}", x, rstd)
    y = y if weight is None else _map("{0} * {1}", y, weight)
    return [_as(result, value) for result, value in zip(results, (y, rstd), strict=True)]


def _rms_norm_backward(arguments: Arguments, results: Sequence[Tensor | None]) -> Results:
    g, x, rstd, weight = (arguments.get(name) for name in ("grad_out", "input", "rstd", "weight"))
    assert isinstance(g, Value)
    assert isinstance(x, Value)
    assert isinstance(rstd, Value)
    y = _map("{0} * {1}", x, rstd)
    dy = g if weight is None else _map("{0} * {1}", g, weight)
    found: list[Value | None] = [None, None]
    if results[0] is not None:
        along = _mean(_map("{0} * {1}", dy, y), _last(x, arguments))
        found[0] = _as(results[0], _map("({0} - {1} * {2}) * {3}", dy, y, along, rstd))
    if results[1] is not None:
        found[1] = _as(results[1], _reduce("sum", _map("{0} * {1}", g, y), _rows(x, arguments)))
    return found


def _softmax(arguments: Arguments, results: Sequence[Tensor | None]) -> Results:
    x = arguments["self"]
    dims = _dims(arguments, x)
    exponential = _map("tl.exp({0} - {1})", x, _reduce("max", x, dims))
    return [_as(results[0], _map("tl.div_rn({0}, {1})", exponential, _reduce("sum", exponential, dims)))]


def _safe_softmax(arguments: Arguments, results: Sequence[Tensor | None]) -> Results:
    """Is 0 in rows that are masked completely, where softmax is NaN."""
    x = arguments["self"]
    dims = _dims(arguments, x)
    most = _reduce("max", x, dims)
    exponential = _map('tl.exp({0} - tl.where({1} == float("-inf"), 0.0, {1}))', x, most)
    total = _reduce("sum", exponential, dims)
    y = _map('tl.where({2} == float("-inf"), 0.0, tl.div_rn({0}, {1}))', exponential, total, most)
    return [_as(results[0], y)]


def _softmax_backward(arguments: Arguments, results: Sequence[Tensor | None]) -> Results:
    g, y = arguments["grad_output"], arguments["output"]
    product = _map("{0} * {1}", g, y)
    total = _reduce("sum", product, _dims(arguments, y))
    return [_as(results[0], _map("{0} - {1} * {2}", product, y, total))]


def _operator(name: str) -> Any:
    """Returns an operator that some versions of PyTorch lack."""
    return getattr(getattr(aten, name, None), "default", name)


_COMPOSITES: dict[Any, Callable[[Arguments, Sequence[Tensor | None]], Results]] = {
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.mean.dim: _mean_of,
    aten.mean.default: _mean_of,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    _operator("_fused_rms_norm"): _rms_norm,
    _operator("_fused_rms_norm_backward"): _rms_norm_backward,
    aten._softmax.default: _softmax,
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
}
