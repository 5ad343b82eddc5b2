r"""Cubins in a folder on disk, one file each.

An entry is data and never executed here. Its first line is the SHA-256 of the rest, its second line describes
the cubin as JSON, and the rest is the image:

    5f1d...e9\n
    {"format": 1, "key": "...", "size": 16840, "name": "_forward", "num_warps": 4, ...}\n
    \x7fELF...

Several processes may use one folder at once: an entry appears complete or not at all. An entry with anything
wrong counts as absent, and the next `store` replaces it. Beside the entry of a generated kernel lies its
source, ``KEY.py``, for whoever debugs it; nothing reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
import uuid
import warnings
from pathlib import Path
from typing import Any

from gpipe_fast.fuse.cubin import Cubin

# The folder; by default `gpipe_fast/cubins` in the user's cache folder.
FOLDER_VARIABLE = "GPIPE_FAST_CACHE"
FORMAT = 1
MAX_FOLDER_BYTES = 512 * 2**20
# An entry above this is not read: no cubin is near.
_MAX_ENTRY_BYTES = 64 * 2**20
_ENTRY, _SOURCE, _TEMPORARY = ".cubin", ".py", ".partial"
# A temporary file of this age in seconds is what an interrupted process left.
_ABANDONED = 3600.0
_FIELDS = {
    "name": str,
    "num_warps": int,
    "num_ctas": int,
    "shared": int,
    "cooperative": bool,
    "launch_pdl": bool,
}

_unwritable: set[Path] = set()  # the folders that a warning has named


def folder() -> Path:
    """Returns the folder of the entries, which may not exist. It begins with ~ if there is no home folder."""
    if named := os.environ.get(FOLDER_VARIABLE):
        return Path(os.path.expanduser(named))
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    return Path(base) / "gpipe_fast" / "cubins"


def load(key: str) -> Cubin | None:
    """Reads an entry and marks it as used.

    Args:
        key: the key that `store` received.

    Returns:
        The cubin; None if there is no such entry, or anything is wrong with it.
    """
    path = folder() / f"{key}{_ENTRY}"
    try:
        cubin = _decode(key, _read(path))
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return cubin


def store(key: str, cubin: Cubin, source: str | None = None) -> None:
    """Writes an entry. Warns once if the folder cannot be written.

    Args:
        key: identifies the cubin; a file name.
        cubin: the cubin.
        source: the source of a generated kernel.
    """
    target = folder() / f"{key}{_ENTRY}"
    try:
        if target.parts[0] == "~":
            raise FileNotFoundError("the user has no home folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source is not None:
            _write(target.with_suffix(_SOURCE), source.encode())
        _write(target, _encode(key, cubin))
    except OSError as error:
        if target.parent not in _unwritable:
            _unwritable.add(target.parent)
            warnings.warn(
                f"compiled kernels cannot be kept in {target.parent} ({error}): every process compiles them "
                f"again; set {FOLDER_VARIABLE} to a folder that can be written",
                stacklevel=2,
            )


def trim(max_bytes: int = MAX_FOLDER_BYTES) -> None:
    """Deletes the entries that were not used for longest, until the rest is below a limit.

    Args:
        max_bytes: the limit of all entries together.
    """
    now, total, entries = time.time(), 0, []
    with contextlib.suppress(OSError), os.scandir(folder()) as files:
        for file in files:
            with contextlib.suppress(OSError):
                status = file.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                if file.name.endswith(_TEMPORARY) and now - status.st_mtime > _ABANDONED:
                    os.unlink(file.path)
                elif file.name.endswith(_ENTRY):
                    total += status.st_size
                    entries.append((status.st_mtime, status.st_size, file.path))
    for _, size, path in sorted(entries):
        if total <= max_bytes:
            break
        for each in (path, f"{path.removesuffix(_ENTRY)}{_SOURCE}"):
            with contextlib.suppress(OSError):
                os.unlink(each)
        total -= size


def _write(target: Path, contents: bytes) -> None:
    temporary = target.with_name(f"{target.stem}-{uuid.uuid4().hex}{_TEMPORARY}")
    try:
        temporary.write_bytes(contents)
        if target.is_dir() and not target.is_symlink():
            target.rmdir()
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    """Returns the contents of a regular file. Opening anything else, such as a pipe, does not block."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_ENTRY_BYTES:
            return b""
        return file.read(_MAX_ENTRY_BYTES)


def _encode(key: str, cubin: Cubin) -> bytes:
    header: dict[str, Any] = {"format": FORMAT, "key": key, "size": len(cubin.image)}
    header |= {name: getattr(cubin, name) for name in _FIELDS}
    rest = json.dumps(header).encode() + b"\n" + cubin.image
    return hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


def _decode(key: str, entry: bytes) -> Cubin | None:
    """Returns the cubin of an entry, or None if the entry is damaged; JSON may raise ValueError."""
    checksum, _, rest = entry.partition(b"\n")
    line, _, image = rest.partition(b"\n")
    if hashlib.sha256(rest).hexdigest().encode() != checksum:
        return None
    header = json.loads(line)
    expected = {"format": FORMAT, "key": key, "size": len(image)}
    if not isinstance(header, dict) or {name: header.get(name) for name in expected} != expected:
        return None
    if any(type(header.get(name)) is not kind for name, kind in _FIELDS.items()):
        return None
    return Cubin(image, **{name: header[name] for name in _FIELDS})
