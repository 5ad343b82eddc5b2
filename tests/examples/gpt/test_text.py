"""The demo's text: which files are read, and which are held out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.gpt import text as demo_text

pytestmark = pytest.mark.usefixtures("one_thread")


def tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def test_whole_files_are_held_out_and_always_the_same(folder: Path) -> None:
    paths = demo_text.files(folder, "*")
    training, held_out = demo_text.split(paths, folder)
    assert sorted(training + held_out) == paths
    assert not set(training) & set(held_out)
    assert {p.parent.name for p in held_out} == {"b"}  # the last of fewer than twenty entries
    assert demo_text.split(demo_text.files(folder, "*"), folder) == (training, held_out)
    text = demo_text.load(folder)
    assert bytes(text.held_out.tolist()) == b"\n".join(p.read_bytes() for p in held_out)
    assert b"left out" not in bytes(text.training.tolist())
    assert b"\0" not in bytes(text.training.tolist())
    assert len(text.training) == sum(len(c) + 1 for c in demo_text.read(training)) - 1


def test_the_standard_library_is_the_default() -> None:
    root = demo_text.standard_library()
    training, held_out = demo_text.split(demo_text.files(root, "*.py"), root)
    names = [p.name for p in training + held_out]
    assert {"argparse.py", "random.py", "decoder.py"} <= set(names)
    assert all(p.suffix == ".py" for p in training + held_out)
    parts = {part for p in training + held_out for part in p.parts}
    assert not parts & {"site-packages", "test", "tests"}
    # A package is held out whole.
    assert not {p.relative_to(root).parts[0] for p in training} & {
        p.relative_to(root).parts[0] for p in held_out
    }


def test_the_end_of_a_single_file_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(1, 101)))
    text = demo_text.load(tmp_path / "text")
    assert text.training.tolist() == list(range(1, 96))
    assert text.held_out.tolist() == list(range(96, 101))


def test_targets_are_the_bytes_that_follow() -> None:
    tokens, targets = demo_text.windows(tensor(b"abcdefgh"), torch.tensor([0, 4]), 3)
    assert [bytes(row) for row in tokens.tolist()] == [b"abc", b"efg"]
    assert [bytes(row) for row in targets.tolist()] == [b"bcd", b"fgh"]
