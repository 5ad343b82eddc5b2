"""The demo's text: Python's standard library, a file or a folder, as bytes to train on and bytes held out."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Of a folder's entries one in so many is held out, a package whole: files of one package resemble each other.
# Of a single file, the last such part.
HOLD_OUT_EVERY = 20
_EXCLUDED = {"__pycache__", "idle_test", "site-packages", "test", "tests"}


class Text(NamedTuple):
    """What to train on and what to measure by; uint8, one element a byte, files joined in sorted order."""

    training: Tensor
    held_out: Tensor


def load(path: Path | None = None) -> Text:
    """Reads a text and holds out a part of it: whole modules and packages, the same ones every time.

    Args:
        path: a folder, whose files are all read; a file, whose end is held out; None for the Python sources
            of the running interpreter's standard library. Packages installed beside it and tests are left
            out, and so are files that are empty or hold a zero byte, which are no text.

    Raises:
        ValueError: there is nothing at ``path``, or no text.
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
    """The folder of the running interpreter's own modules."""
    return Path(sysconfig.get_paths()["stdlib"])


def files(root: Path, pattern: str) -> list[Path]:
    """Lists the files below ``root`` that match, sorted by path."""
    found = root.rglob(pattern)
    return sorted(p for p in found if p.is_file() and not _EXCLUDED.intersection(p.relative_to(root).parts))


def split(paths: Sequence[Path], root: Path) -> tuple[list[Path], list[Path]]:
    """Parts files into those to train on and those below each twentieth entry of ``root``, or its last."""
    entries = sorted({p.relative_to(root).parts[0] for p in paths})
    chosen = {*(entries[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY] or entries[-1:])}
    held_out = [p for p in paths if p.relative_to(root).parts[0] in chosen]
    return [p for p in paths if p not in held_out], held_out


def read(paths: Sequence[Path]) -> list[bytes]:
    """Reads files, leaving out those that are empty or no text."""
    contents = (p.read_bytes() for p in paths)
    return [c for c in contents if c and b"\0" not in c]


def windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cuts windows out of a text.

    Args:
        text: uint8, of shape (bytes,).
        starts: int64, of shape (n,), each at most ``bytes - length - 1``.
        length: bytes per window.

    Returns:
        The bytes and, for each, the one that follows it; int64, of shape (n, length).
    """
    positions = starts[:, None] + torch.arange(length + 1)
    cut = text[positions].long()
    return cut[:, :-1], cut[:, 1:]


def spread(text: Tensor, count: int, length: int) -> Tensor:
    """Where ``count`` windows begin that lie evenly over a text: always the same ones; int64."""
    return torch.linspace(0, len(text) - length - 1, count, dtype=torch.float64).long()


def _bytes(contents: Sequence[bytes]) -> Tensor:
    joined = bytearray(b"\n".join(contents))
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
