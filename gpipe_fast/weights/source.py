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

from gpipe_fast.weights.entry import Entry
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
        TypeError: the source is neither a mapping nor a path, or the file contains no mapping.
        ValueError: a file is incomplete, or an index names a tensor that its file lacks.
    """
    if isinstance(source, Mapping):
        return _of_mapping(source)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"the source must be a state dict or the path of a file, got {type(source).__name__}; pass a "
            "mapping of names to tensors, or the path of a .safetensors, .index.json or .pt file"
        )
    path = Path(source)
    return _of_index(path) if path.name.endswith(".index.json") else _of_file(path)


def _of_mapping(source: Mapping[str, Any]) -> Entries:
    found = Entries()
    for name in source:
        value = source[name]
        if isinstance(value, Tensor):
            like = torch.empty(value.shape, dtype=value.dtype, device="meta")
            value = Entry(like, functools.partial(source.__getitem__, name))
        found[name] = value
    found.metadata = getattr(source, "_metadata", None)
    return found


def _of_file(path: Path) -> Entries:
    if path.suffix == ".safetensors":
        return Entries(safetensors_entries(path))
    # With weights_only=True, the file cannot execute code.
    loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(loaded, Mapping):
        raise TypeError(
            f"{path} contains a {type(loaded).__name__}, not a state dict; save model.state_dict()"
        )
    return _of_mapping(loaded)


def _of_index(path: Path) -> Entries:
    """Returns the entries of the files that an index names, as Hugging Face writes it."""
    index = json.loads(path.read_text())
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict):
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
