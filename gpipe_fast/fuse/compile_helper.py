"""A process that compiles kernels, each in a fork of its own.

Only this helper forks, never the process that trains, and it imports the modules of kernels but no script: a
kernel that a script or a notebook defines is compiled in the process that asks::

    process that trains    pickled jobs ->     helper    fork ->   one kernel, written to the disk cache
                           <- pickled results            <- result

The helper and its forks end as soon as its standard input is closed, however the other process ends.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from gpipe_fast.fuse.cubin import (
    CompileFailure,
    Cubin,
    cached,
    compile_here,
    generated_from,
    kernel_of,
    last_lines,
)
from gpipe_fast.lower.launch import KernelSource

_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from gpipe_fast.fuse.compile_helper import main; main()"
_STANDARD_INPUT = 0
# The index of a job, and the result; None if the helper has not found the kernel.
Result = tuple[int, "Cubin | CompileFailure | None"]


@dataclass(frozen=True)
class Job:
    """A kernel to compile, by the name under which the helper finds it.

    Attributes:
        module: the kernel's module.
        qualname: the kernel's qualified name in the module.
        text: the source of a generated kernel, which has no module.
        key: Triton's hash of the kernel; "" if this process interprets kernels.
        others: the other fields of `KernelSource`.
    """

    module: str
    qualname: str
    text: str | None
    key: str
    others: dict[str, Any]

    def find(self) -> KernelSource | None:
        """Returns the source; None if the kernel cannot be imported, or has changed since it was hashed."""
        try:
            kernel = (
                kernel_of(self.qualname, self.text) if self.text else _imported(self.module, self.qualname)
            )
            same = not self.key or kernel.cache_key == self.key
        except Exception:  # whatever an import raises
            return None
        return KernelSource(kernel, **self.others) if same else None


def job_of(source: KernelSource) -> Job | None:
    """Returns the job for a source; None if only this process has the kernel."""
    function = source.kernel.fn
    module, qualname, text = function.__module__, function.__qualname__, generated_from(function)
    if text is None:
        if module == "__main__" or module not in sys.modules:
            return None
        try:
            found = _imported(module, qualname).fn
        except AttributeError:  # a function or a notebook's cell defines it
            return None
        if found is not function:
            return None
    others = {name: value for name, value in vars(source).items() if name != "kernel"}
    return Job(module, qualname, text, getattr(source.kernel, "cache_key", ""), others)


def _imported(module: str, qualname: str) -> Any:
    """Returns a kernel without the autotuners and heuristics around it."""
    kernel = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    while hasattr(getattr(kernel, "fn", None), "fn"):
        kernel = kernel.fn
    return kernel


def compile_in_helper(
    jobs: Sequence[Job], capability: int, folder: str, workers: int, keep: Callable[[Result], None]
) -> None:
    """Compiles kernels in a helper process, which has ended when this returns, for whatever reason.

    Args:
        jobs: the kernels.
        capability: the GPU's compute capability, 90 for 9.0.
        folder: the folder of Triton's disk cache.
        workers: the number of kernels that are compiled at once.
        keep: called with each result as soon as it is there. If the helper ends early, results are missing.

    Raises:
        OSError: the system has no room for a process or its files.
    """
    with tempfile.TemporaryDirectory(prefix="gpipe_fast-") as temporary:
        changed = {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": temporary,  # ptxas leaves its files there if it is killed
            "TRITON_STORE_BINARY_ONLY": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={k: v for k, v in {**os.environ, **changed}.items() if k != "TRITON_INTERPRET"},
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the helper
        )
        requests, replies = process.stdin, process.stdout
        assert requests is not None
        assert replies is not None
        try:
            # A helper that is killed may leave a part of a reply.
            with contextlib.suppress(EOFError, BrokenPipeError, pickle.UnpicklingError):
                pickle.dump((jobs, capability, folder, workers), requests)
                requests.flush()
                while True:
                    keep(pickle.load(replies))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def main() -> None:
    """Runs the helper, the leader of a process group."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # modules that are imported may print
    with contextlib.suppress(EOFError, BrokenPipeError):  # the other process has ended
        for result in _results(*pickle.load(requests)):
            pickle.dump(result, replies)
            replies.flush()


def _results(jobs: Sequence[Job], capability: int, folder: str, workers: int) -> Iterator[Result]:
    """Yields each job's result as soon as it is there."""
    importlib.import_module("triton.compiler.code_generator")  # here, not in every fork
    waiting = list(enumerate(jobs))[::-1]
    running: dict[int, tuple[int, _Fork]] = {}  # by the fork's pipe
    while waiting or running:
        if waiting and len(running) < workers:
            index, job = waiting.pop()
            source = job.find()
            if source is None:
                yield index, None
            elif found := cached(source, capability, folder):  # another process has just compiled it
                yield index, found
            else:
                fork = _Fork(source, capability, folder)
                running[fork.receiver.fileno()] = index, fork
            continue
        pipes = [_STANDARD_INPUT, *running]
        for ready in select.select(pipes, (), ())[0]:
            if ready == _STANDARD_INPUT:  # it is closed
                os.killpg(0, signal.SIGKILL)
            index, fork = running.pop(ready)
            yield index, fork.result()


class _Fork:
    """A process that compiles one kernel."""

    def __init__(self, source: KernelSource, capability: int, folder: str) -> None:
        context = multiprocessing.get_context("fork")
        self.receiver, sender = context.Pipe(duplex=False)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `result` closes it
        self._process = context.Process(target=self._run, args=(source, capability, folder, sender))
        self._process.start()
        sender.close()

    def _run(self, source: KernelSource, capability: int, folder: str, sender: Connection) -> None:
        os.dup2(self._log.fileno(), 2)
        sender.send(compile_here(source, capability, folder))

    def result(self) -> Cubin | CompileFailure:
        """Returns what the process has made; a reason with the last lines of its standard error."""
        result: Cubin | CompileFailure | None = None
        with contextlib.suppress(EOFError, OSError):  # OSError: it ended while it sent
            result = self.receiver.recv()
        self._process.join()
        if result is None:
            code = self._process.exitcode or 0
            how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
            result = CompileFailure(f"the process that compiled the kernel ended with {how}")
        if isinstance(result, CompileFailure):
            self._log.seek(0)
            if messages := last_lines(self._log.read().decode(errors="replace")):
                result = CompileFailure(f"{result.reason} ({messages})")
        self._log.close()
        self.receiver.close()
        return result
