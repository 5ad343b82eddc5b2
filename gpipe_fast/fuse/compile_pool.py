"""Processes that compile kernels in parallel."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

from gpipe_fast.devices import available_processors
from gpipe_fast.fuse.compile_worker import last_lines, parse_reply
from gpipe_fast.fuse.cubin import CompileFailure, Cubin

# The number of processes; 0 compiles in the process that asks.
WORKERS_VARIABLE = "GPIPE_FAST_COMPILE_WORKERS"
# A process takes 0.5 GB of memory, so that more of them are started only if the user says so.
MAX_WORKERS = 16
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; from gpipe_fast.fuse.compile_worker import main; "
    "main(int(sys.argv[1]), sys.argv[2])"
)
# The index of a request and what a worker replied.
_Result = tuple[int, "Cubin | CompileFailure | None"]
# Seconds between two looks at the clock while nothing arrives.
_TICK = 0.5


def num_workers() -> int:
    """Returns the number of processes to use at most.

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


@dataclass
class _Worker:
    """A process, the request that it works on, and what it has written of its reply."""

    process: subprocess.Popen[bytes]
    log: Path
    request: int | None = None
    log_start: int = 0
    ready: bool = False
    ended: bool = False
    written: bytearray = field(default_factory=bytearray)

    def end(self) -> int:
        """Kills the process and those that it started; returns its exit code."""
        if self.ended:  # its output is closed: the exit code follows at once
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_TICK)
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        return self.process.wait()

    def messages(self) -> str:
        """Returns what the process has written to standard error since its current request."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(self.log_start)
            return log.read().decode(errors="replace")
        return ""


class CompilePool:
    """Worker processes, as a context. On exit no process is left, whatever the reason.

    Args:
        count: the number of workers.

    Raises:
        OSError: no process can be started; from entering the context.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._folder = Path()
        self._workers: list[_Worker] = []
        self._started = 0
        self._last_messages = ""
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> CompilePool:
        self._folder = Path(tempfile.mkdtemp(prefix="gpipe_fast-"))
        try:
            for _ in range(self._count):
                self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(self, requests: Sequence[str]) -> Iterator[_Result | None]:
        """Lets the workers answer requests; a free worker takes the next one.

        Args:
            requests: one line per kernel; see `compile_worker.request`.

        Yields:
            The index of a request with its cubin, the reason why it has none, or None if the worker has not
            found the kernel, as soon as that is known; None about twice a second while nothing arrives.
        """
        waiting = list(range(len(requests)))[::-1]
        left = len(requests)
        while left:
            events = self._selector.select(_TICK)
            if not events:
                yield None
            for key, _ in events:
                worker: _Worker = key.data
                if result := self._receive(worker):
                    left -= 1
                    yield result
                    if worker.ended and waiting:
                        self._start()
                if not worker.ended and worker.request is None and worker.ready and waiting:
                    worker.request = waiting.pop()
                    self._send(worker, requests[worker.request])
            if not self._workers and waiting:
                reason = f"no process that compiles kernels could start: {self._last_messages}"
                yield from ((index, CompileFailure(reason)) for index in waiting)
                return

    def _start(self) -> None:
        self._started += 1
        log = self._folder / f"worker{self._started}.log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(os.getpid()), str(self._folder), *map(str, sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=self._environment(),
                start_new_session=True,  # Ctrl-C reaches only the parent, which ends the workers
            )
        worker = _Worker(process, log)
        self._workers.append(worker)
        self._selector.register(_pipe(process.stdout), selectors.EVENT_READ, worker)

    def _environment(self) -> dict[str, str]:
        changed = {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self._folder),  # for files of ptxas, which it leaves there if it is killed
            "TRITON_CACHE_DIR": str(self._folder / "triton"),
            "TRITON_DISABLE_LINE_INFO": "1",  # a third of the size
            "TRITON_STORE_BINARY_ONLY": "1",
            WORKERS_VARIABLE: "0",  # a worker starts no workers
        }
        return {k: v for k, v in {**os.environ, **changed}.items() if k != "TRITON_INTERPRET"}

    def _send(self, worker: _Worker, line: str) -> None:
        worker.log_start = worker.log.stat().st_size
        with contextlib.suppress(OSError):  # a worker that has ended; select reports it
            pipe = _pipe(worker.process.stdin)
            pipe.write(line.encode())
            pipe.flush()

    def _receive(self, worker: _Worker) -> _Result | None:
        """Reads from a worker's pipe; returns the result of its request if that is complete."""
        chunk = os.read(_pipe(worker.process.stdout).fileno(), 2**20)
        if not chunk:
            return self._failure_of_ended(worker)
        worker.written += chunk
        if not worker.written.endswith(b"\n"):
            return None
        line, worker.written = bytes(worker.written), bytearray()
        if worker.request is None:
            worker.ready = True
            return None
        index, worker.request = worker.request, None
        result = parse_reply(line)
        if isinstance(result, CompileFailure) and (messages := last_lines(worker.messages())):
            result = CompileFailure(f"{result.reason} ({messages})")
        return index, result

    def _failure_of_ended(self, worker: _Worker) -> _Result | None:
        """Removes a worker that has ended; its request, if any, has failed."""
        self._selector.unregister(_pipe(worker.process.stdout))
        self._workers.remove(worker)
        worker.ended = True
        code = worker.end()
        self._last_messages = last_lines(worker.messages())
        if worker.request is None:
            return None
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        reason = f"the process that compiled the kernel ended with {how}: {self._last_messages}"
        return worker.request, CompileFailure(reason.removesuffix(": "))

    def _end(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._selector.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _pipe(file: IO[bytes] | None) -> IO[bytes]:
    assert file is not None
    return file
