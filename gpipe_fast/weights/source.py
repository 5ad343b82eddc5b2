"""Where weights come from: a mapping, or a file of one of three formats."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpipe_fast.weights.lazy_tensor import Entry
from gpipe_fast.weights.safetensors_file import safetensors_entries

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
            like = torch.empty(value.shape, dtype=value.dtype, device="meta")
            value = Entry(like, functools.partial(source.__getitem__, name))
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
