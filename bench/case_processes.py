"""Runs cases one after the other in child processes, so that a crash or a hang costs one case only.

If a case crashes its process or exceeds its time limit, a new process continues with the next case. The same
happens after a CUDA error, which makes the device unusable for the rest of a process.

    parent ──starts──▶ child ──["begin", name], ["end", name, result] as lines of JSON──▶ parent
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

# Time limit in seconds for one case, and for the start of a process.
CASE_SECONDS = 40.0
# Time limit in seconds for the end of a killed process, which a driver may prevent.
KILL_SECONDS = 5.0


class ChildProcess:
    """A process in its own process group; each line that it prints is a list in JSON."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read_lines, daemon=True).start()

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def next(self, seconds: float) -> Sequence[Any] | None:
        """Returns the next message; None if the process ended or sends nothing within `seconds`."""
        # A process that crashes may leave half a line.
        with contextlib.suppress(queue.Empty, json.JSONDecodeError):
            return list(json.loads(self._lines.get(timeout=max(0.0, seconds))))
        return None

    def stop(self) -> str:
        """Kills the process and its children if it still runs; returns how it ended."""
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
    command: Sequence[str],
    names: Sequence[str],
    seconds: float,
    keep: Callable[[str, Any, float], object],
    case_seconds: float = CASE_SECONDS,
) -> list[str]:
    """Runs all cases and returns those that did not end within the time limit.

    Args:
        command: starts a process that serves the cases whose names follow it.
        names: names of the cases, in order.
        seconds: time limit for all cases.
        keep: receives each case as soon as it ends: its name, its result or a text that says why it has none,
            and its seconds.
        case_seconds: time limit for one case.
    """
    deadline, left = time.monotonic() + seconds, list(names)
    while left and time.monotonic() < deadline:
        process, begin = ChildProcess([*command, *left]), time.monotonic()
        at: str | None = left[0]  # the case that failed if the process ends or hangs now
        how = ""
        try:
            while left and (message := process.next(min(case_seconds, deadline - time.monotonic()))):
                kind, name, *result = message
                if kind == "begin":
                    at, begin = name, time.monotonic()
                    continue
                keep(name, result[0], time.monotonic() - begin)
                left.remove(name)
                at = None
        finally:
            how = process.stop()
        if at is not None and time.monotonic() < deadline:
            keep(at, how, time.monotonic() - begin)
            left.remove(at)
    return left


def command_of(module: str, *options: str) -> list[str]:
    """Returns the command of a module that calls `serve` after ``--here`` and the options."""
    return [sys.executable, "-X", "faulthandler", "-m", module, "--here", *options]


def connect_to_parent() -> Callable[[Sequence[Any]], None]:
    """Returns a function that sends a message to the parent; other output to stdout goes to stderr."""
    messages = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: Sequence[Any]) -> None:
        print(json.dumps(message), file=messages, flush=True)

    return send


def serve(names: Sequence[str], measure: Callable[[str], Any]) -> None:
    """Runs cases in this process, and sends their results, or what they raise, to the parent.

    Raises:
        RuntimeError: the device has become unusable.
    """
    send = connect_to_parent()
    for name in names:
        send(["begin", name])
        try:
            result = measure(name)
        except Exception as error:
            traceback.print_exc()
            result = failure(error)
        free()
        send(["end", name, result])


def failure(error: Exception) -> str:
    """Returns what went wrong, in one line."""
    return f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:400]}"


def free() -> None:
    """Waits for the device and frees unused memory, such as that of captured graphs."""
    import torch  # the parent does without

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
