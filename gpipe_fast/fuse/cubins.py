"""Machine code of kernels: from memory, from Triton's disk cache or from a helper, and loaded on a device."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import fields, replace

import torch

from gpipe_fast import progress
from gpipe_fast._extension import Kernel
from gpipe_fast.devices import available_processors
from gpipe_fast.fuse.compile_helper import Result, compile_in_helper, job_of
from gpipe_fast.fuse.cubin import (
    FOLDER_VARIABLE,
    CompileFailure,
    Cubin,
    cache_folder,
    cached,
    compile_here,
    refusal,
)
from gpipe_fast.lower.launch import KernelLaunch, KernelSource

# The number of kernels to compile at once; 0 compiles in the process that asks.
WORKERS_VARIABLE = "GPIPE_FAST_COMPILE_WORKERS"
# A compilation takes up to 0.5 GB of memory, so that more of them are started only if the user says so.
MAX_WORKERS = 16

_log = logging.getLogger("gpipe_fast")
_lock = threading.Lock()
# Every result of this process, including failures, which are not kept on disk.
_memory: dict[Hashable, Cubin | CompileFailure] = {}


def num_workers() -> int:
    """Returns the number of kernels to compile at once.

    Raises:
        ValueError: the environment variable is no number.
    """
    named = os.environ.get(WORKERS_VARIABLE)
    if named is None:
        return min(available_processors(), MAX_WORKERS)
    if not named.isdecimal():
        raise ValueError(
            f"the environment variable {WORKERS_VARIABLE} must be a number of processes, got {named!r}; "
            "unset it for one per processor, or set 0 to compile in the main process"
        )
    return int(named)


def cubins(sources: Sequence[KernelSource], capability: tuple[int, int]) -> list[Cubin | CompileFailure]:
    """Returns the machine code of kernels. Compiles what neither this process nor the disk has.

    The disk cache is Triton's, in the folder `$GPIPE_FAST_CACHE` if that is set. At most
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
        keys = [(source.identity, architecture) for source in sources]
        missing: dict[Hashable, KernelSource] = {}
        for key, source in zip(keys, sources, strict=True):
            if key in _memory or key in missing:
                continue
            if reason := refusal(source):
                _memory[key] = CompileFailure(reason)
            elif found := cached(source, architecture, cache_folder()):
                _memory[key] = found
            else:
                missing[key] = source
        if missing:
            _compile(missing, architecture)
        return [_memory[key] for key in keys]


def _compile(missing: dict[Hashable, KernelSource], architecture: int) -> None:
    """Compiles sources by key, and keeps each result as soon as it is there."""
    folder, left = _writable_folder(cache_folder()), dict(missing)
    with progress.working("compiling Triton kernels", ", once for this machine") as work:

        def keep(key: Hashable, result: Cubin | CompileFailure) -> None:
            _memory[key] = result
            del left[key]
            work.count(len(missing) - len(left), len(missing))

        work.count(0, len(missing))
        jobs = {key: job for key, source in missing.items() if (job := job_of(source)) is not None}
        keys, workers = list(jobs), num_workers() if sys.executable else 0

        def keep_found(result: Result) -> None:
            if result[1] is not None:
                keep(keys[result[0]], result[1])

        if jobs and workers:
            try:
                compile_in_helper(list(jobs.values()), architecture, folder, workers, keep_found)
            except OSError as error:
                _log.info("kernels are compiled in this process: %s", error)
        for key, source in list(left.items()):
            keep(key, compile_here(source, architecture, folder))


@functools.cache
def _writable_folder(named: str) -> str:
    """Returns a folder for Triton's disk cache: a temporary one, after a warning, if it cannot be written."""
    try:
        if named.startswith("~"):
            raise FileNotFoundError("the user has no home folder")
        os.makedirs(named, exist_ok=True)
        tempfile.TemporaryFile(dir=named).close()
    except OSError as error:
        warnings.warn(
            f"compiled kernels cannot be kept in {named} ({error}): every process compiles them again; "
            f"set {FOLDER_VARIABLE} to a folder that can be written",
            stacklevel=2,
        )
        temporary = tempfile.mkdtemp(prefix="gpipe_fast-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return temporary
    return named


class KernelLoader:
    """Compiles the kernels of launches, and loads them on a device.

    Attributes:
        device: the device.
        capability: the device's compute capability.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes a loader for a CUDA device."""
        self.device = device
        self.capability = torch.cuda.get_device_capability(device)

    def failures(self, launches: Sequence[KernelLaunch]) -> list[str]:
        """Compiles both forms of each kernel, in parallel, and loads them on the device.

        Returns:
            For each launch why it is impossible, as in "it does not compile .."; "" if it is possible.
        """
        sources = [source for launch in launches for source in sources_of(launch)]
        found = cubins(sources, self.capability)
        pairs = zip(found[::2], found[1::2], strict=True)
        return [self._failure(a) or self._failure(b) for a, b in pairs]

    def _failure(self, form: Cubin | CompileFailure) -> str:
        if isinstance(form, CompileFailure):
            return f"it does not compile for this GPU ({form.reason})"
        try:
            _load(form, self.device)
        except RuntimeError as error:
            reason, _, _ = str(error).partition("\n")
            return f"it does not load on {self.device} ({reason})"
        return ""

    def load(self, launch: KernelLaunch) -> tuple[Kernel, Kernel]:
        """Returns a launch's kernel for aligned pointers and for any pointers, loaded on the device."""
        aligned, unaligned = cubins(sources_of(launch), self.capability)
        assert isinstance(aligned, Cubin)
        assert isinstance(unaligned, Cubin)
        return _load(aligned, self.device), _load(unaligned, self.device)


def sources_of(launch: KernelLaunch) -> tuple[KernelSource, KernelSource]:
    """Returns what is compiled for a launch: forms for pointers that are divisible by 16, and for any."""
    pointers = tuple(launch.signature[i][0] for i in launch.aligned)
    source = KernelSource(**{each.name: getattr(launch, each.name) for each in fields(KernelSource)})
    return replace(source, divisible=(*pointers, *launch.divisible)), source


@functools.lru_cache(maxsize=4096)
def _load(cubin: Cubin, device: torch.device) -> Kernel:
    return Kernel(
        cubin.image,
        cubin.name,
        32 * cubin.num_warps,
        cubin.num_ctas,
        cubin.shared,
        cubin.cooperative,
        cubin.launch_pdl,
        device,
    )
