"""Runs cases one after the other in child processes, so that a crash or a hang costs one case only.

If a case crashes its process or exceeds its time limit, a new process continues with the next case. The same
happens after a CUDA error, which makes the device unusable for the rest of a process.

    parent ──starts──▶ child ──["begin", name], ["end", name, ..] as lines of JSON──▶ parent
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

# Time limit in seconds for one case, and for the start of a process.
CASE_SECONDS = 40.0
# Time limit in seconds for the end of a killed process, which a driver may prevent.
KILL_SECONDS = 5.0


class Process(Protocol):
    """A process that runs cases one after the other."""

    def next(self, seconds: float) -> Sequence[Any] | None:
        """Returns the next message: `["begin", name]` or `["end", name, *result]`.

        Returns None if the process ended or sends nothing within `seconds`.
        """

    def stop(self) -> str:
        """Kills the process if it still runs; returns how it ended."""


class ChildProcess:
    """A process in its own process group; each line that it prints is a list in JSON."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read_lines, daemon=True).start()

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def next(self, seconds: float) -> Sequence[Any] | None:
        """Returns the next message; None if there is none."""
        # A process that crashes may leave half a line.
        with contextlib.suppress(queue.Empty, json.JSONDecodeError):
            return list(json.loads(self._lines.get(timeout=max(0.0, seconds))))
        return None

    def stop(self) -> str:
        """Kills the process and its children; returns how it ended."""
        late = self._process.poll() is None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)  # lets a process that has sent its last message exit
            late = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            code = self._process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return "FAILED: its process hangs and cannot be killed"
        return "FAILED: time limit exceeded" if late else f"FAILED: its process exited with {code}"


def run_cases(
    names: Sequence[str],
    seconds: float,
    start: Callable[[Sequence[str]], Process],
    keep: Callable[[str, Sequence[Any] | str, float], object],
    clock: Callable[[], float] = time.monotonic,
    case_seconds: float = CASE_SECONDS,
) -> list[str]:
    """Runs all cases and returns those that did not end within the time limit.

    Args:
        names: names of the cases, in order.
        seconds: time limit for all cases.
        start: starts a process that runs the given cases.
        keep: receives each case as soon as it ends: its name, its result or how its process ended, and its
            seconds.
        clock: returns the current time in seconds.
        case_seconds: time limit for one case.
    """
    deadline, left = clock() + seconds, list(names)
    while left and clock() < deadline:
        process, begin = start(tuple(left)), clock()
        at: str | None = left[0]  # the case that failed if the process ends or hangs now
        how = ""
        try:
            while left and (message := process.next(min(case_seconds, deadline - clock()))):
                kind, name, *result = message
                if kind == "begin":
                    at, begin = name, clock()
                    continue
                keep(name, result, clock() - begin)
                left.remove(name)
                at = None
        finally:
            how = process.stop()
        if at is not None and clock() < deadline:
            keep(at, how, clock() - begin)
            left.remove(at)
    return left


def connect_to_parent() -> Callable[[Sequence[Any]], None]:
    """Returns a function that sends a message to the parent; other output to stdout goes to stderr."""
    messages = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: Sequence[Any]) -> None:
        print(json.dumps(message), file=messages, flush=True)

    return send
