"""A cache of C++ builds for tests: shared by all workers and runs, and rebuilt when a source changes."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "tests"


def cached_build(
    name: str, sources: Iterable[Path], options: Sequence[str], build: Callable[[Path], object]
) -> Path:
    """Returns the folder with the output of ``build``; builds only if it is not cached.

    Args:
        name: the folder's name without the version hash.
        sources: files, or folders of files, on whose contents the output depends.
        options: other inputs of the build, such as commands and versions.
        build: builds into the empty folder that it is given; a failed build is not cached.
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
            for old in FOLDER.glob(f"{name}-*[0-9a-f]"):  # excludes partial folders
                shutil.rmtree(old)
            partial.rename(folder)
    return folder
