"""The sources of weights: mappings, files of `torch.save`, safetensors files, and sharded checkpoints."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.weights.source import _DTYPES, Entries, entries_of, safetensors_entries

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


TENSORS = {
    **{str(dtype): torch.arange(6).to(dtype).view(2, 3) for dtype in _DTYPES.values()},
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "odd": torch.arange(3, dtype=torch.uint8),
}


def test_every_dtype_and_shape_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "all.safetensors", metadata={"format": "pt"})
    entries = safetensors_entries(tmp_path / "all.safetensors")
    assert entries.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        like, found = entries[name].like, entries[name].read()
        assert like.is_meta
        assert (like.shape, like.dtype) == (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(found.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8)), name


def test_tensors_are_read_when_asked_for(tmp_path: Path) -> None:
    """A tensor that is read is writable, and not the one of an earlier read."""
    path = tmp_path / "one.safetensors"
    save_file({"x": torch.zeros(2)}, path)
    entry = safetensors_entries(path)["x"]
    entry.read().fill_(1)
    assert entry.read().tolist() == [0, 0]
    save_file({"x": torch.ones(2)}, path)
    assert entry.read().tolist() == [1, 1]


def write(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def described(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"", "its header would have"),
        (b"{", "its header would have 1 of 17 bytes"),
        (b"no JSON", "its header is not JSON"),
        (b"[" * 10**5, "its header is not JSON"),
        ({"x": 1}, "its header describes 'x' as 1"),
        (described(dtype="F7"), "describes 'x' as .*F7"),
        (described(shape=["a"]), "describes 'x' as"),
        (described(shape=[-2]), "describes 'x' as"),
        (described(offsets=[0]), "describes 'x' as"),
        (described(offsets=[0.0, 8.0]), "describes 'x' as"),
        (described(offsets=[0, 4]), "'x' takes 8 bytes, at the offsets 0 to 4 of 8 bytes of data"),
        (described(offsets=[4, 12]), "'x' takes 8 bytes, at the offsets 4 to 12 of 8 bytes of data"),
        (described(offsets=[-8, 0]), "'x' takes 8 bytes, at the offsets -8 to 0 of 8 bytes of data"),
    ],
)
def test_broken_files_are_refused(header: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, header, bytes(8))
    with pytest.raises(ValueError, match=rf"x.safetensors is no complete safetensors file: .*{reason}"):
        safetensors_entries(path)


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        (([0, 8], [4, 12]), "a tensor begins at the offset 4, and the one before it ends at 8"),
        (([4, 12], [12, 20]), "a tensor begins at the offset 4, and the one before it ends at 0"),
        (([0, 8], [12, 20]), "a tensor begins at the offset 12, and the one before it ends at 8"),
        (([8, 16], [0, 8]), "its tensors end at the offset 16 of 20 bytes of data"),
    ],
)
def test_tensors_that_overlap_or_leave_a_gap_are_refused(
    spans: tuple[list[int], list[int]], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    header = {name: described(offsets=span)["x"] for name, span in zip("ab", spans, strict=True)}
    write(path, header, bytes(20))
    with pytest.raises(ValueError, match=f"is no complete safetensors file: {reason}; "):
        safetensors_entries(path)


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(8)}, path)
    entry = safetensors_entries(path)["x"]
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ValueError, match="it ends 12 bytes before the end of a tensor"):
        entry.read()
