"""Files in the format safetensors: equal to what the package of that name writes; broken ones are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gpipe_fast.weights.safetensors_file import _DTYPES, safetensors_entries

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
