"""The demo's text (Python's standard library, a file or a folder): a training set and a held-out set."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# One in this many entries of a folder is held out. A package is held out as a whole, because its files
# resemble each other. For a single file, the last twentieth of its bytes is held out.
HOLD_OUT_EVERY = 20
_EXCLUDED = {"__pycache__", "idle_test", "site-packages", "test", "tests"}


class Text(NamedTuple):
    """The training set and the held-out set: uint8, one element per byte, files joined in sorted order."""

    training: Tensor
    held_out: Tensor


def load(path: Path | None = None) -> Text:
    """Reads a text and splits it deterministically; whole modules and packages are held out.

    Args:
        path: a folder, whose files are all read; a file, whose end is held out; or None for the Python
            sources of the running interpreter's standard library. Installed packages, tests, empty files and
            files with a zero byte (binary files) are excluded.

    Raises:
        ValueError: ``path`` does not exist.
    """
    if path is not None and not path.exists():
        raise ValueError(f"there is no file or folder {path}")
    if path is not None and path.is_file():
        content = path.read_bytes()
        cut = len(content) - len(content) // HOLD_OUT_EVERY
        return Text(_bytes([content[:cut]]), _bytes([content[cut:]]))
    root = standard_library() if path is None else path
    training, held_out = split(files(root, "*.py" if path is None else "*"), root)
    return Text(_bytes(read(training)), _bytes(read(held_out)))


def standard_library() -> Path:
    """Returns the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def files(root: Path, pattern: str) -> list[Path]:
    """Returns the files below ``root`` that match ``pattern``, sorted by path."""
    found = root.rglob(pattern)
    return sorted(p for p in found if p.is_file() and not _EXCLUDED.intersection(p.relative_to(root).parts))


def split(paths: Sequence[Path], root: Path) -> tuple[list[Path], list[Path]]:
    """Splits files into a training set and a held-out set.

    The held-out set is all files in every twentieth entry of ``root``, or in the last of fewer entries.
    """
    entries = sorted({p.relative_to(root).parts[0] for p in paths})
    chosen = {*(entries[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY] or entries[-1:])}
    held_out = [p for p in paths if p.relative_to(root).parts[0] in chosen]
    return [p for p in paths if p not in held_out], held_out


def read(paths: Sequence[Path]) -> list[bytes]:
    """Reads files; skips empty and binary ones."""
    contents = (p.read_bytes() for p in paths)
    return [c for c in contents if c and b"\0" not in c]


def windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cuts windows out of a text.

    Args:
        text: uint8, of shape (bytes,).
        starts: int64, of shape (n,), each at most ``bytes - length - 1``.
        length: bytes per window.

    Returns:
        The bytes of the windows and, for each byte, the next one; both int64, of shape (n, length).
    """
    positions = starts[:, None] + torch.arange(length + 1)
    cut = text[positions].long()
    return cut[:, :-1], cut[:, 1:]


def evenly_spaced_starts(text: Tensor, count: int, length: int) -> Tensor:
    """Returns the starts of ``count`` evenly spaced windows of a text, int64; deterministic."""
    return torch.linspace(0, len(text) - length - 1, count, dtype=torch.float64).long()


def _bytes(contents: Sequence[bytes]) -> Tensor:
    joined = bytearray(b"\n".join(contents))
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
