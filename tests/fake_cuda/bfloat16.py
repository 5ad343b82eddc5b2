"""bfloat16 in Triton's interpreter: conversions that round to nearest even, and arithmetic in fp32.

The interpreter keeps bf16 numbers as uint16. It truncates when it converts fp32 to bf16, and its arithmetic
uses the integers. `correct` replaces those methods, so that kernels store the same bf16 numbers as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
# The NaN that a GPU's conversion returns.
CANONICAL_NAN = 0x7FFF
_ARITHMETIC = (
    "unary_op",
    "binary_op",
    "ternary_op",
    "create_fma",
    "create_rsqrt",
    "create_erf",
    "create_dot",
)


def round_to_bf16(wide: Array) -> Array:
    """Rounds numbers to bf16, to nearest even; returns the bits as uint16."""
    bits = np.ascontiguousarray(wide, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    is_nan = bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000)
    return np.where(is_nan, np.uint32(CANONICAL_NAN), rounded).astype(np.uint16).reshape(np.shape(wide))


def widen(bits: Array) -> Array:
    """Returns bf16 numbers, given by their bits, as fp32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def correct(interpreter: Any, tl: Any) -> None:
    """Corrects the bf16 of Triton's interpreter, for the rest of the process.

    Args:
        interpreter: The module `triton.runtime.interpreter`.
        tl: The module `triton.language`.
    """
    builder = interpreter.InterpreterBuilder
    _correct_conversions(interpreter, tl)
    for name in _ARITHMETIC:
        setattr(builder, name, _in_fp32(getattr(builder, name), interpreter, tl))
    for operations in (interpreter.ReduceOps, interpreter.ScanOps):
        operations.apply_impl = _reduce_in_fp32(operations.apply_impl, interpreter, tl)
    builder.get_bf16 = lambda self, value: interpreter.TensorHandle(
        round_to_bf16(np.array([value], np.float32)), tl.bfloat16
    )


def _correct_conversions(interpreter: Any, tl: Any) -> None:
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, convert = builder.cast_impl, builder.create_fp_to_fp

    def cast_corrected(self: Any, source: Any, target: Any) -> Any:
        if tl.bfloat16 not in (source.dtype.scalar, target.scalar) or source.dtype.scalar == target.scalar:
            return cast(self, source, target)
        wide = widen(source.data) if source.dtype.scalar == tl.bfloat16 else source.data
        if target.scalar == tl.bfloat16:
            return handle(round_to_bf16(wide.astype(np.float32)), tl.bfloat16)
        return handle(wide.astype(interpreter._get_np_dtype(target)), target.scalar)

    def convert_corrected(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.dtype.scalar == tl.bfloat16:
            return convert(self, handle(widen(source.data), tl.float32), target, rounding)
        if target.scalar != tl.bfloat16:
            return convert(self, source, target, rounding)
        assert rounding != interpreter._ir.ROUNDING_MODE.RTZ, "no kernel rounds toward zero"
        return handle(round_to_bf16(source.data.astype(np.float32)), tl.bfloat16)

    builder.cast_impl, builder.create_fp_to_fp = cast_corrected, convert_corrected


def _in_fp32(method: Callable[..., Any], interpreter: Any, tl: Any) -> Callable[..., Any]:
    """Returns a method that computes in fp32 if an operand is bf16, and rounds a bf16 result once."""
    handle = interpreter.TensorHandle

    def compute(self: Any, *given: Any) -> Any:
        if not any(isinstance(each, handle) and each.dtype.scalar == tl.bfloat16 for each in given):
            return method(self, *given)
        result = method(self, *(_widened(each, handle, tl) for each in given))
        # The last operand has the result's type: both factors of a product may be bf16, and the sum fp32.
        operands = [each for each in given if isinstance(each, handle)]
        narrow = operands[-1].dtype.scalar == tl.bfloat16 and result.data.dtype == np.float32
        return handle(round_to_bf16(result.data), tl.bfloat16) if narrow else result

    return compute


def _widened(each: Any, handle: Any, tl: Any) -> Any:
    is_bf16 = isinstance(each, handle) and each.dtype.scalar == tl.bfloat16
    return handle(widen(each.data), tl.float32) if is_bf16 else each


def _reduce_in_fp32(method: Callable[..., Any], interpreter: Any, tl: Any) -> Callable[..., Any]:
    """Returns a reduction that computes in fp32 if an operand is bf16; a GPU rounds every partial sum."""

    def reduce(self: Any, given: Sequence[Any]) -> Any:
        if all(each.dtype != tl.bfloat16 for each in given):
            return method(self, given)
        result = method(self, tuple(_cast(each, tl.float32, interpreter) for each in given))
        results = result if isinstance(result, (list, tuple)) else [result]
        pairs = zip(results, given, strict=True)
        narrow = [_cast(r, tl.bfloat16, interpreter) if g.dtype == tl.bfloat16 else r for r, g in pairs]
        return narrow if isinstance(result, (list, tuple)) else narrow[0]

    return reduce


def _cast(tensor: Any, dtype: Any, interpreter: Any) -> Any:
    result = interpreter.interpreter_builder.cast_impl(tensor.handle, dtype)
    shape = list(result.data.shape)
    block = interpreter.tl.block_type(dtype, shape) if tensor.type.is_block() else dtype
    return interpreter.tl.tensor(result, block)
