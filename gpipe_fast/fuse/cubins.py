"""Machine code of kernels: from memory, from the cache on disk, or from worker processes that compile it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from gpipe_fast import progress
from gpipe_fast.fuse import cubin_cache
from gpipe_fast.fuse.compile_pool import CompilePool, num_workers
from gpipe_fast.fuse.compile_worker import compile_here, request
from gpipe_fast.fuse.cubin import CompileFailure, Cubin, KernelSource
from gpipe_fast.fuse.generated import generated_from
from gpipe_fast.fuse.kernel_name import name_of, source_of

__all__ = ["CompileFailure", "Cubin", "KernelSource", "cubins"]

_CONSTANT_TYPES = (bool, int, float, str, type(None))

_log = logging.getLogger("gpipe_fast")
_lock = threading.Lock()
# Every result of this process by key, including failures, which are not kept on disk.
_memory: dict[str, Cubin | CompileFailure] = {}


def cubins(sources: Sequence[KernelSource], capability: tuple[int, int]) -> list[Cubin | CompileFailure]:
    """Returns the machine code of kernels. Compiles what neither this process nor the disk has.

    The folder of the cache is `$GPIPE_FAST_CACHE`, by default ``~/.cache/gpipe_fast/cubins``. At most
    `$GPIPE_FAST_COMPILE_WORKERS` processes compile at once, by default one per processor and at most 16; with
    0, this process compiles.

    Args:
        sources: the kernels; equal ones are compiled once.
        capability: the GPU's compute capability, as `torch.cuda.get_device_capability` returns it.

    Returns:
        For every source its cubin, or the reason why it has none.
    """
    architecture = 10 * capability[0] + capability[1]
    with _lock:
        keys = [_key(source, architecture) for source in sources]
        wanted = {key: source for key, source in zip(keys, sources, strict=True) if key not in _memory}
        missing = {}
        for key, source in wanted.items():
            if reason := _refusal(source):
                _memory[key] = CompileFailure(reason)
            elif found := cubin_cache.load(key):
                _memory[key] = found
            else:
                missing[key] = source
        if missing:
            _compile(missing, architecture)
        return [_memory[key] for key in keys]


def forget() -> None:
    """Forgets what this process has compiled or read; the disk keeps its entries."""
    with _lock:
        _memory.clear()


def _refusal(source: KernelSource) -> str:
    """Returns why a source cannot be compiled, if that is known beforehand."""
    wrong = [f"{name} = {value!r}" for name, value in source.constants if type(value) not in _CONSTANT_TYPES]
    if wrong:
        return f"constants must be bool, int, float, str or None, got {', '.join(wrong)}"
    return (
        ""
        if source_of(source.kernel)
        else "Triton does not allow a function or variable that the kernel uses"
    )


def _key(source: KernelSource, architecture: int) -> str:
    """Returns a hash of everything that the machine code depends on."""
    function = getattr(source.kernel, "fn", source.kernel)
    parts = [
        cubin_cache.FORMAT,
        [function.__module__, function.__qualname__, source_of(source.kernel)],
        [source.signature, source.constants, source.divisible],
        [source.num_warps, source.num_stages, source.contracts],
        architecture,
        _compiler(architecture),
    ]
    return hashlib.sha256(json.dumps(parts, default=repr).encode()).hexdigest()


_compilers: dict[int, list[Any]] = {}


def _compiler(architecture: int) -> list[Any]:
    """Returns what identifies Triton, its assembler and the variables that change its output."""
    from triton import __version__
    from triton._C import libtriton
    from triton.backends.nvidia.compiler import get_ptxas_version

    if architecture not in _compilers:
        size = os.stat(libtriton.__file__).st_size  # builds from source share a version
        _compilers[architecture] = [__version__, size, str(get_ptxas_version(architecture))]
    return [*_compilers[architecture], sorted(libtriton.get_cache_invalidating_env_vars().items())]


def _compile(missing: dict[str, KernelSource], architecture: int) -> None:
    """Compiles sources by key, and keeps each result as soon as it is there."""
    total = len(missing)
    try:
        with progress.working("compiling Triton kernels", ", once for this machine") as work:
            work.count(0, total)
            here = _compile_in_workers(missing, architecture, work)
            for done, key in enumerate(here, total - len(here)):
                work.count(done, total)
                _keep(key, missing[key], compile_here(missing[key], architecture))
    finally:
        cubin_cache.trim()


def _compile_in_workers(
    missing: dict[str, KernelSource], architecture: int, work: progress.Work
) -> list[str]:
    """Compiles what worker processes can; returns the keys that this process must compile."""
    names = {key: name_of(source.kernel) for key, source in missing.items()}
    lines = {
        key: request(name, missing[key], architecture) for key, name in names.items() if name is not None
    }
    keys, left = list(lines), dict.fromkeys(missing)
    workers = min(num_workers(), len(keys)) if sys.executable else 0
    if not workers:
        return list(left)
    try:
        with CompilePool(workers) as pool:
            for reply in pool.run(list(lines.values())):
                if reply is not None and reply[1] is not None:
                    _keep(keys[reply[0]], missing[keys[reply[0]]], reply[1])
                    del left[keys[reply[0]]]
                    work.count(len(missing) - len(left), len(missing))
    except OSError as error:  # the system has no room for processes or their files
        _log.info("kernels are compiled in this process: %s", error)
    return list(left)


def _keep(key: str, source: KernelSource, result: Cubin | CompileFailure) -> None:
    _memory[key] = result
    if isinstance(result, Cubin):
        function = getattr(source.kernel, "fn", source.kernel)
        cubin_cache.store(key, result, generated_from(function))
