"""Reads files in the format safetensors, one tensor at a time.

A file is an 8-byte little-endian length, a JSON header of that length, and the bytes of the tensors::

    {"0.weight": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}, "__metadata__": {...}}

Offsets count from the end of the header. Source: https://github.com/huggingface/safetensors. The package
safetensors is not needed. It maps the whole file into memory; here a tensor is read when it is asked for, so
that memory never contains a second one.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from gpipe_fast.weights.lazy_tensor import Entry

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def safetensors_entries(path: Path) -> dict[str, Entry]:
    """Returns the tensors of a file by name. Only the header is read.

    Raises:
        ValueError: the file is not complete, or has another format.
    """
    header, begin = _header(path)
    data_bytes = os.path.getsize(path) - begin
    found: dict[str, Entry] = {}
    spans: list[tuple[int, int]] = []
    for name, fields in header.items():
        if name != "__metadata__":
            like, first, last = _parsed(path, name, fields)
            if not 0 <= first <= last <= data_bytes or last - first != like.nbytes:
                _refuse(
                    path,
                    f"{name!r} takes {like.nbytes} bytes, at the offsets {first} to {last} of {data_bytes} "
                    "bytes of data",
                )
            found[name] = Entry(
                like, functools.partial(_read, path, begin + first, like.dtype, tuple(like.shape))
            )
            spans.append((first, last))
    _check_spans(path, spans, data_bytes)
    return found


def _parsed(path: Path, name: str, fields: Any) -> tuple[Tensor, int, int]:
    """Returns a meta tensor of a tensor's shape and dtype, and the offsets of its data."""
    try:
        dtype, shape, (first, last) = _DTYPES[fields["dtype"]], fields["shape"], fields["data_offsets"]
        like = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return like, operator.index(first), operator.index(last)
    except (KeyError, TypeError, ValueError, RuntimeError):
        _refuse(path, f"its header describes {name!r} as {fields!r}")


def _check_spans(path: Path, spans: Iterable[tuple[int, int]], data_bytes: int) -> None:
    """Checks that tensors neither overlap nor leave a gap, as the format demands."""
    end = 0
    for first, last in sorted(spans):
        if first != end:
            _refuse(path, f"a tensor begins at the offset {first}, and the one before it ends at {end}")
        end = last
    if end != data_bytes:
        _refuse(path, f"its tensors end at the offset {end} of {data_bytes} bytes of data")


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the header, and the position of the first tensor in the file."""
    file_bytes = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= file_bytes - 8:
            _refuse(path, f"its header would have {length} of {file_bytes} bytes")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            _refuse(path, "its header is not JSON")
    if not isinstance(header, dict):
        _refuse(path, f"its header is a {type(header).__name__}")
    return header, 8 + length


def _read(path: Path, position: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    buffer = bytearray(math.prod(shape) * dtype.itemsize)
    if not buffer:
        return torch.empty(shape, dtype=dtype, device="cpu")
    with open(path, "rb") as file:
        file.seek(position)
        count = file.readinto(buffer)
    if count != len(buffer):
        _refuse(path, f"it ends {len(buffer) - count} bytes before the end of a tensor")
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def _refuse(path: Path, reason: str) -> NoReturn:
    raise ValueError(f"{path} is no complete safetensors file: {reason}; download or save it again")
