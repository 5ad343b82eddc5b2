"""Keeps the cubins of interpreted kernels on disk: Triton, which cannot hash these kernels, does not."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Hashable
from pathlib import Path
from unittest import mock

import triton

from gpipe_fast.fuse import cubins
from gpipe_fast.fuse.compile_helper import job_of
from gpipe_fast.fuse.cubin import CompileFailure, Cubin
from gpipe_fast.lower.launch import KernelSource

KERNELS = Path(__file__).parents[2] / "kernels"


def _file(source: KernelSource, architecture: int) -> Path:
    sources = [*sorted(KERNELS.glob("*.py")), Path(source.kernel.fn.__code__.co_filename)]
    parts = [path.read_bytes() for path in sources if path.exists()]
    parts.append(repr((job_of(source), architecture, triton.__version__)).encode())
    return Path(os.environ["GPIPE_FAST_CACHE"]) / f"{hashlib.sha256(b''.join(parts)).hexdigest()}.pickle"


def _cached(source: KernelSource, architecture: int, folder: str) -> Cubin | None:
    file = _file(source, architecture)
    found: Cubin | None = pickle.loads(file.read_bytes()) if file.exists() else None
    return found


def keep_cubins() -> None:
    """Makes this process read and write the files."""
    compile_missing = cubins._compile

    def compile_and_write(missing: dict[Hashable, KernelSource], architecture: int) -> None:
        compile_missing(missing, architecture)
        for key, source in missing.items():
            made = cubins._memory[key]
            if not isinstance(made, CompileFailure):
                file = _file(source, architecture)
                temporary = file.with_suffix(f".{os.getpid()}")
                temporary.write_bytes(pickle.dumps(made))
                temporary.replace(file)

    mock.patch.object(cubins, "_compile", compile_and_write).start()
    mock.patch.object(cubins, "cached", _cached).start()
