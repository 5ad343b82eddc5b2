"""What Triton compiles for: the types of a kernel's arguments, and what they are divisible by."""

from __future__ import annotations

import torch

_ELEMENTS = {
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bool: "u1",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def pointer_type(dtype: torch.dtype, constant: bool = False) -> str:
    """Returns the type of a tensor, such as ``*bf16``; "" if Triton has none for the dtype.

    Args:
        dtype: the tensor's dtype.
        constant: whether the kernel only reads the tensor.
    """
    element = _ELEMENTS.get(dtype, "")
    return element and f"*{'k' * constant}{element}"


def number_type(value: float) -> str:
    """Returns the type that Triton's own launcher gives a number."""
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, float):
        return "fp32"
    if -(2**31) <= value < 2**31:
        return "i32"
    return "i64" if value < 2**63 else "u64"


def is_divisible(value: object) -> bool:
    """Returns whether Triton's own launcher compiles for a number that is divisible by 16."""
    return type(value) is int and value % 16 == 0
