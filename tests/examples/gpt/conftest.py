"""A fixture: a folder of text for training."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """45 distinct files in two folders; also two files and a folder that the demo must exclude."""
    for i in range(45):
        file = tmp_path / "text" / ("ab"[i % 2]) / f"{i:02}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"def f%02d(x):\n    return x + %02d\n" % (i, i) * 4)
    (tmp_path / "text" / "a" / "00-binary").write_bytes(b"\0\1\2")
    (tmp_path / "text" / "a" / "00-empty").touch()
    (tmp_path / "text" / "tests").mkdir()
    (tmp_path / "text" / "tests" / "left_out.py").write_text("left out\n")
    return tmp_path / "text"
