"""Operators that regions compute element by element, as expressions in Triton's language."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gpipe_fast.fuse.regions.values import Constant, Mapped, Value

aten = torch.ops.aten
# The arguments of an operator by name, with values in place of nodes.
Arguments = Mapping[str, Any]

# Kernels compute tensors of these dtypes in fp32. They also read masks.
FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
DTYPES = FLOATS | {torch.bool}


class Unsupported(Exception):
    """A region cannot compute an operator with these arguments."""


def literal(number: float) -> str:
    """Returns a number as an expression."""
    if isinstance(number, bool) or not isinstance(number, float):
        return repr(number)
    return repr(number) if math.isfinite(number) else f'float("{number}")'


def map_operator(target: Any, arguments: Arguments, result: Tensor) -> Value:
    """Returns the value of an element-wise operator.

    Args:
        target: the operator.
        arguments: its arguments.
        result: its result, of which shape and dtype are read.

    Raises:
        Unsupported: a region cannot compute it.
    """
    shape, dtype = tuple(result.shape), result.dtype
    if dtype not in FLOATS:
        raise Unsupported
    if target in _COPIES:
        return Mapped(shape, dtype, "{0}", (arguments["self"],))
    template, operands = _EXPRESSIONS[target](arguments)
    return Mapped(shape, dtype, template, operands)


def is_element_wise(target: Any) -> bool:
    """Returns whether an operator is computed element by element, perhaps with some arguments only."""
    return target in _TARGETS


def _tensors(arguments: Arguments, *names: str) -> tuple[Value, ...]:
    """Returns the operands with these names; numbers become constants."""
    found = []
    for name in names:
        given = arguments.get(name)
        if given is None:
            continue
        found.append(given if isinstance(given, Value) else Constant((), torch.float32, float(given)))
    return tuple(found)


Expression = tuple[str, tuple[Value, ...]]


def _simple(template: str, *names: str) -> Callable[[Arguments], Expression]:
    return lambda arguments: (template, _tensors(arguments, *(names or ("self",))))


def _with_alpha(symbol: str) -> Callable[[Arguments], Expression]:
    def build(arguments: Arguments) -> Expression:
        alpha = arguments.get("alpha", 1)
        scaled = "{1}" if alpha == 1 else f"{{1}} * {literal(alpha)}"
        return f"{{0}} {symbol} {scaled}", _tensors(arguments, "self", "other")

    return build


def _rsub(arguments: Arguments) -> Expression:
    alpha = arguments.get("alpha", 1)
    scaled = "{0}" if alpha == 1 else f"{{0}} * {literal(alpha)}"
    return f"{{1}} - {scaled}", _tensors(arguments, "self", "other")


def _div(arguments: Arguments) -> Expression:
    number = arguments["other"]
    if not isinstance(number, Value):  # PyTorch multiplies by the reciprocal on a GPU
        if not number:
            raise Unsupported
        reciprocal = float(torch.tensor(1.0) / torch.tensor(float(number)))
        return f"{{0}} * {literal(reciprocal)}", _tensors(arguments, "self")
    return "tl.div_rn({0}, {1})", _tensors(arguments, "self", "other")


_POWERS = {
    -2.0: "tl.div_rn(1.0, {0} * {0})", -1.0: "tl.div_rn(1.0, {0})", -0.5: "tl.rsqrt({0})",
    0.5: "tl.sqrt_rn({0})", 1.0: "{0}", 2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}",
}  # fmt: skip


def _pow(arguments: Arguments) -> Expression:
    exponent = float(arguments["exponent"])
    if exponent not in _POWERS:
        raise Unsupported
    return _POWERS[exponent], _tensors(arguments, "self")


def _clamp(arguments: Arguments) -> Expression:
    low, high = arguments.get("min"), arguments.get("max")
    template = "{0}"
    if low is not None:
        template = f"tl.maximum({template}, {literal(float(low))}, {_NAN})"
    if high is not None:
        template = f"tl.minimum({template}, {literal(float(high))}, {_NAN})"
    return template, _tensors(arguments, "self")


_NAN = "propagate_nan=tl.PropagateNan.ALL"


def _gelu(template: str, *names: str) -> Callable[[Arguments], Expression]:
    def build(arguments: Arguments) -> Expression:
        kind = "gelu_tanh" if arguments.get("approximate", "none") == "tanh" else "gelu"
        return template.replace("KIND", kind), _tensors(arguments, *names)

    return build


def _threshold_backward(arguments: Arguments) -> Expression:
    threshold = literal(float(arguments["threshold"]))
    return f"tl.where({{1}} <= {threshold}, 0.0, {{0}})", _tensors(arguments, "grad_output", "self")


def _leaky_relu(arguments: Arguments) -> Expression:
    slope = literal(float(arguments.get("negative_slope", 0.01)))
    return f"tl.where({{0}} > 0.0, {{0}}, {{0}} * {slope})", _tensors(arguments, "self")


def _leaky_relu_backward(arguments: Arguments) -> Expression:
    slope = literal(float(arguments["negative_slope"]))
    operands = _tensors(arguments, "grad_output", "self")
    return f"tl.where({{1}} > 0.0, {{0}}, {{0}} * {slope})", operands


def _hardtanh_backward(arguments: Arguments) -> Expression:
    low, high = (literal(float(arguments[name])) for name in ("min_val", "max_val"))
    operands = _tensors(arguments, "grad_output", "self")
    return f"tl.where(({{1}} <= {low}) | ({{1}} >= {high}), 0.0, {{0}})", operands


def _dropout_backward(arguments: Arguments) -> Expression:
    scale = literal(float(arguments["scale"]))
    operands = _tensors(arguments, "grad_output", "mask")
    return f"tl.where({{1}} != 0.0, {{0}} * {scale}, 0.0)", operands


_EXPRESSIONS: dict[Any, Callable[[Arguments], Expression]] = {
    aten.add.Tensor: _with_alpha("+"),
    aten.add.Scalar: _with_alpha("+"),
    aten.sub.Tensor: _with_alpha("-"),
    aten.sub.Scalar: _with_alpha("-"),
    aten.rsub.Tensor: _rsub,
    aten.rsub.Scalar: _rsub,
    aten.mul.Tensor: _simple("{0} * {1}", "self", "other"),
    aten.mul.Scalar: _simple("{0} * {1}", "self", "other"),
    aten.div.Tensor: _div,
    aten.div.Scalar: _div,
    aten.pow.Tensor_Scalar: _pow,
    aten.neg.default: _simple("-{0}"),
    aten.abs.default: _simple("tl.abs({0})"),
    aten.square.default: _simple("{0} * {0}"),
    aten.reciprocal.default: _simple("tl.div_rn(1.0, {0})"),
    aten.sqrt.default: _simple("tl.sqrt_rn({0})"),
    aten.rsqrt.default: _simple("tl.rsqrt({0})"),
    aten.exp.default: _simple("tl.exp({0})"),
    aten.log.default: _simple("tl.log({0})"),
    aten.sin.default: _simple("tl.sin({0})"),
    aten.cos.default: _simple("tl.cos({0})"),
    aten.erf.default: _simple("tl.erf({0})"),
    aten.sigmoid.default: _simple("tl.sigmoid({0})"),
    aten.tanh.default: _simple("hyperbolic_tangent({0})"),
    aten.sgn.default: _simple("tl.where({0} > 0.0, 1.0, tl.where({0} < 0.0, -1.0, 0.0))"),
    aten.sign.default: _simple("tl.where({0} > 0.0, 1.0, tl.where({0} < 0.0, -1.0, 0.0))"),
    aten.relu.default: _simple(f"tl.maximum({{0}}, 0.0, {_NAN})"),
    aten.silu.default: _simple('activate({0}, "silu")'),
    aten.gelu.default: _gelu('activate({0}, "KIND")', "self"),
    aten.maximum.default: _simple(f"tl.maximum({{0}}, {{1}}, {_NAN})", "self", "other"),
    aten.minimum.default: _simple(f"tl.minimum({{0}}, {{1}}, {_NAN})", "self", "other"),
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: _clamp,
    aten.hardtanh.default: lambda a: _clamp({"self": a["self"], "min": a["min_val"], "max": a["max_val"]}),
    aten.hardtanh_backward.default: _hardtanh_backward,
    aten.leaky_relu.default: _leaky_relu,
    aten.leaky_relu_backward.default: _leaky_relu_backward,
    aten.sigmoid_backward.default: _simple("{0} * ((1.0 - {1}) * {1})", "grad_output", "output"),
    aten.tanh_backward.default: _simple("{0} * (1.0 - {1} * {1})", "grad_output", "output"),
    aten.threshold_backward.default: _threshold_backward,
    aten.silu_backward.default: _simple('{0} * activation_derivative({1}, "silu")', "grad_output", "self"),
    aten.gelu_backward.default: _gelu('{0} * activation_derivative({1}, "KIND")', "grad_output", "self"),
    aten.native_dropout_backward.default: _dropout_backward,
}
_COPIES = frozenset({aten._to_copy.default, aten.clone.default, aten.lift_fresh_copy.default})
_TARGETS = _COPIES.union(_EXPRESSIONS)
