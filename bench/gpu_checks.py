"""Runs small cases on a GPU and keeps a growing table of results: `python -m bench.gpu_checks models`.

The cases run one after the other in a child process. If a case crashes its process or exceeds its time
limit, it is reported as failed and a new process continues with the next case, because some CUDA errors make
the device unusable for the rest of the process.

    gpu_checks ──starts──▶ gpu_checks --here ──"begin mlp", "end mlp .."──▶ gpu_checks ──▶ gpu-models.md
"""

from __future__ import annotations

import argparse
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
from dataclasses import dataclass
from typing import Any, Protocol

from bench import measure

SECONDS = float(os.environ.get("GPIPE_FAST_SECONDS", "60"))
# Time limit in seconds for one case, and for the start of a process.
CASE_SECONDS = 40.0
PHASES = ("models", "plans")
TITLES = {
    "models": "Steps of each model on GPUs, compared with the plain loop",
    "plans": "Interleaved plans, memory and precision on GPUs, compared with the plain loop",
}
HEADERS = ("case", "compared with the plain loop", "captured", "s")
NOTE = (
    "Outputs, gradients and buffers of several steps are compared bit for bit with the plain loop's, under "
    "deterministic algorithms. From the third step on, a replay is expected; if there is none, the column "
    "'captured' gives the reason.\n"
)


@dataclass(frozen=True)
class Row:
    """The result of a case.

    Attributes:
        good: whether the case passed.
        text: differences, failure, or 'equal'.
        captured: what was replayed.
        seconds: duration.
    """

    good: bool
    text: str
    captured: str = ""
    seconds: float = 0.0


class Process(Protocol):
    """A process that runs cases one after the other."""

    def next(self, seconds: float) -> list[Any] | None:
        """Returns the next message: `["begin", name]` or `["end", name, good, text, captured]`.

        Returns None if the process ended or sends nothing within `seconds`.
        """

    def stop(self) -> str:
        """Kills the process if it still runs; returns how it ended."""


class ChildProcess:
    """A process in its own process group; each line that it prints is a list in JSON."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=measure.ROOT, start_new_session=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read_lines, daemon=True).start()

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def next(self, seconds: float) -> list[Any] | None:
        with contextlib.suppress(queue.Empty):
            line = self._lines.get(timeout=max(0.0, seconds))
            return None if line is None else list(json.loads(line))
        return None

    def stop(self) -> str:
        late = self._process.poll() is None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)  # lets a process that has sent its last message exit
            late = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        return "FAILED: time limit exceeded" if late else f"FAILED: its process exited with {code}"


def run_all(
    names: Sequence[str],
    seconds: float,
    start: Callable[[Sequence[str]], Process],
    keep: Callable[[str, Row], object],
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Runs all cases and returns whether all passed.

    Args:
        names: names of the cases, in order.
        seconds: time limit for all cases.
        start: starts a process that runs the given cases.
        keep: receives the result of each case as soon as it is known.
        clock: returns the current time in seconds.
    """
    deadline, left, good = clock() + seconds, list(names), True
    while left and clock() < deadline:
        process, begin = start(left), clock()
        at: str | None = left[0]  # the case that failed if the process ends or hangs now
        while left and (message := process.next(min(CASE_SECONDS, deadline - clock()))):
            if message[0] == "begin":
                at, begin = message[1], clock()
                continue
            _, name, well, text, captured = message
            row = Row(well, text, captured, clock() - begin)
            good = good and row.good
            keep(name, row)
            left.remove(name)
            at = None
        how = process.stop()
        if at is not None:
            good = False
            keep(at, Row(False, how, seconds=clock() - begin))
            left.remove(at)
    for name in left:
        keep(name, Row(False, "skipped: no time left"))
    return good and not left


def run_in_this_process(phase: str, names: Sequence[str]) -> None:
    """Runs cases in this process and prints the results; raises if the device has become unusable."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from bench.gpu_cases import PHASES as CASES

    torch.use_deterministic_algorithms(True, warn_only=True)
    cases = CASES[phase]()
    for name in names:
        send(["begin", name])
        try:
            verdict = cases[name]()
            send(["end", name, verdict.good, verdict.text, verdict.captured])
        except Exception as error:
            traceback.print_exc()
            words = " ".join(str(error).split())[:400]  # the table has one line per case
            send(["end", name, False, f"FAILED: {type(error).__name__}: {words}", ""])
        gc.collect()  # frees the memory of captured graphs
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def send(words: list[object]) -> None:
    print(json.dumps(words), flush=True)


class Results:
    """The table of one phase, rewritten with every row."""

    def __init__(self, phase: str) -> None:
        self._phase = phase
        self._rows: dict[str, Row] = {}

    def keep(self, name: str, row: Row) -> None:
        self._rows[name] = row
        cells = [[n, r.text, r.captured, r.seconds] for n, r in self._rows.items()]
        measure.report(f"gpu-{self._phase}", TITLES[self._phase], HEADERS, cells, NOTE, printed=False)
        print(f"{name}: {row.text} [{row.captured}] {row.seconds:.1f} s", flush=True)


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_checks", description=__doc__)
    parser.add_argument("phase", choices=PHASES)
    parser.add_argument("name", nargs="*", help="cases to run (default: all)")
    parser.add_argument("--here", action="store_true", help="run the cases in this process")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args(arguments)
    from bench.gpu_cases import PHASES as CASES

    every = list(CASES[options.phase]())
    if unknown := set(options.name) - set(every):
        parser.error(f"unknown case: {', '.join(unknown)}; choose from {', '.join(every)}")
    names = options.name or every
    if options.here:
        run_in_this_process(options.phase, names)
        return
    command = [sys.executable, "-X", "faulthandler", "-m", "bench.gpu_checks", "--here", options.phase]
    results = Results(options.phase)
    good = run_all(names, options.seconds, lambda left: ChildProcess([*command, *left]), results.keep)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
