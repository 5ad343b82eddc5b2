"""Where weights come from: a mapping, or a file of one of three formats.

A file in the format safetensors is an 8-byte little-endian length, a JSON header of that length, and the
bytes of the tensors::

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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from gpipe_fast.weights.lazy_tensor import Entry, entry_of

Source = Mapping[str, Any] | str | os.PathLike[str]


class Entries(dict[str, Any]):
    """A state dict that has an `Entry` in place of each tensor.

    Attributes:
        metadata: the versions of modules, which ``state_dict()`` adds; None if the source has none.
    """

    metadata: Any = None


def entries_of(source: Source) -> Entries:
    """Returns the entries of a source. See `GPipe.load_weights` for the kinds of sources.

    Raises:
        TypeError: the source is neither a mapping nor a path, the file contains no mapping, or a name is no
            string.
        ValueError: a file is incomplete or has another format, the path is that of a folder, an index names a
            tensor that its file lacks, or a tensor is on the meta device.
    """
    if isinstance(source, Mapping):
        return _of_mapping(source)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"the source must be a state dict or the path of a file, got {type(source).__name__}; pass a "
            "mapping of names to tensors, or the path of a .safetensors, .index.json or .pt file"
        )
    path = Path(source)
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder; pass a file in it, such as model.safetensors, or the index of a sharded "
            "checkpoint, model.safetensors.index.json"
        )
    return _of_index(path) if path.name.endswith(".index.json") else _of_file(path)


def _of_mapping(source: Mapping[str, Any]) -> Entries:
    found = Entries()
    for name in source:
        if not isinstance(name, str):
            raise TypeError(f"the names in a state dict must be strings, got {name!r}; pass names of tensors")
        value = source[name]
        if isinstance(value, Tensor):
            if value.is_meta:
                raise ValueError(
                    f"the source has {name!r} on the meta device, without data; pass the tensors of a file, "
                    "or of a model that is loaded"
                )
            value = entry_of(value)._replace(read=functools.partial(source.__getitem__, name))
        found[name] = value
    found.metadata = getattr(source, "_metadata", None)
    return found


def _of_file(path: Path) -> Entries:
    if path.suffix == ".safetensors":
        return Entries(safetensors_entries(path))
    # With weights_only=True, the file cannot execute code.
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except RuntimeError as error:
        raise ValueError(
            f"{path} cannot be mapped into memory as a file of torch.save: {error}; download or save it "
            "again, or pass torch.load(path) if the file is older than PyTorch 1.6"
        ) from error
    if not isinstance(loaded, Mapping):
        raise TypeError(
            f"{path} contains a {type(loaded).__name__}, not a state dict; save model.state_dict()"
        )
    return _of_mapping(loaded)


def _of_index(path: Path) -> Entries:
    """Returns the entries of the files that an index names, as Hugging Face writes it."""
    try:
        index = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        index = None
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(
            f"{path} has no 'weight_map' from the names of tensors to files; pass the index of a sharded "
            "checkpoint, such as model.safetensors.index.json"
        )
    shards = {file: _of_file(path.parent / file) for file in dict.fromkeys(files.values())}
    lacking = [name for name, file in files.items() if name not in shards[file]]
    if lacking:
        raise ValueError(
            f"{path} names tensors that its files lack: {', '.join(lacking)}; download or save them again"
        )
    return Entries({name: shards[file][name] for name, file in files.items()})


_DTYPES = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (64, 32, 16)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (64, 32, 16, 8)},
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (64, 32, 16, 8)},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz},
    **{"F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
    **{"BF16": torch.bfloat16, "C64": torch.complex64, "BOOL": torch.bool},
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
