"""Compiles C++ for tests: once for all workers and runs, and again when a source changes."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "tests"


def built(
    name: str, sources: Iterable[Path], options: Sequence[str], build: Callable[[Path], object]
) -> Path:
    """Returns the folder that ``build`` has filled.

    Args:
        name: of the folder, without what tells versions apart.
        sources: files, or folders of files, whose bytes the result depends on.
        options: what else it depends on: commands, versions.
        build: fills the folder that it is given; after a failure the next call starts with an empty one.
    """
    digest = hashlib.sha256("\0".join(options).encode())
    for source in sources:
        for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if file.suffix in {".cpp", ".h", ".cu", ".cuh"}:
                digest.update(file.read_bytes())
    folder = FOLDER / f"{name}-{digest.hexdigest()[:16]}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / f"{name}.lock"):
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            build(partial)
            for old in FOLDER.glob(f"{name}-*[0-9a-f]"):  # no partial one
                shutil.rmtree(old)
            partial.rename(folder)
    return folder
