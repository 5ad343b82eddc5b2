"""The sources of weights: mappings, files of `torch.save`, safetensors files, and sharded checkpoints."""

from __future__ import annotations

import json
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.weights.source import Entries, entries_of

STATE = OrderedDict(a=torch.ones(2, 3), b=torch.arange(4))


def save_shards(folder: Path, suffix: str) -> Path:
    """Saves each tensor in a file of its own, and returns the index."""
    for name, tensor in STATE.items():
        save = save_file if suffix == ".safetensors" else torch.save
        save({name: tensor}, folder / (name + suffix))
    index = folder / f"model{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {name: name + suffix for name in STATE}}))
    return index


def test_tensors_have_names_shapes_and_values(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "state.pt")
    save_file(STATE, tmp_path / "state.safetensors")
    files = [tmp_path / "state.pt", str(tmp_path / "state.safetensors")]
    for source in (STATE, *files, *(save_shards(tmp_path, suffix) for suffix in (".safetensors", ".bin"))):
        entries = entries_of(source)
        assert entries.keys() == STATE.keys()
        for name, tensor in STATE.items():
            like = entries[name].like
            assert (like.is_meta, like.shape, like.dtype) == (True, tensor.shape, tensor.dtype)
            assert torch.equal(entries[name].read(), tensor)


def test_versions_of_modules_are_kept(tmp_path: Path) -> None:
    """State dicts have them as an attribute; a batch norm of version 1 has no num_batches_tracked."""
    state = nn.BatchNorm1d(2).state_dict()
    torch.save(state, tmp_path / "norm.pt")
    assert entries_of(state).metadata == entries_of(tmp_path / "norm.pt").metadata == {"": {"version": 2}}
    assert Entries().metadata is None
    old = OrderedDict((f"0.{name}", tensor) for name, tensor in state.items() if "num" not in name)
    new = OrderedDict(old)
    new._metadata = {"0": {"version": 2}}  # type: ignore[attr-defined]
    GPipe(nn.Sequential(nn.BatchNorm1d(2)), [1]).load_weights(old)
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        GPipe(nn.Sequential(nn.BatchNorm1d(2)), [1]).load_weights(new)


def test_other_values_are_passed_on() -> None:
    assert entries_of({"x._extra_state": {"steps": 3}}) == {"x._extra_state": {"steps": 3}}


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def test_files_cannot_execute_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Malicious()}, "model.pt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        entries_of("model.pt")
    assert not Path("executed").exists()


@pytest.mark.parametrize("kind", ["empty", "cut off", "another format", "before PyTorch 1.6"])
def test_files_of_torch_save_that_cannot_be_mapped_are_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(STATE, path, _use_new_zipfile_serialization=kind != "before PyTorch 1.6")
    if kind != "before PyTorch 1.6":
        contents = {"empty": b"", "cut off": path.read_bytes()[:-100], "another format": b"abc" * 40}
        path.write_bytes(contents[kind])
    with pytest.raises(ValueError, match=r"model\.pt cannot be mapped into memory as a file of torch\.save"):
        entries_of(path)


def test_an_index_without_a_map_is_refused(tmp_path: Path) -> None:
    message = r"x\.index\.json has no 'weight_map' from the names of tensors to"
    for content in (b'{"weight_map": ["a"]}', b'{"weight_map": {"a": 3}}', b"\xff\xfe\x00", b"[" * 10**5):
        (tmp_path / "x.index.json").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            entries_of(tmp_path / "x.index.json")
