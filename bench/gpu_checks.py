"""Runs small cases on a GPU, and keeps a table that grows with each: `python -m bench.gpu_checks models`.

Cases run in a process of their own, one after the other. A case that takes the process with it, or is not
done in its time, is noted, and another process goes on with the next: after some errors a GPU is of no use to
a process any more.

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
# For one case, or for a process until its first one.
PATIENCE = 40.0
PHASES = ("models", "plans")
TITLES = {
    "models": "Steps of each model on GPUs, against the plain loop",
    "plans": "Plans that interleave, memory and precision on GPUs, against the plain loop",
}
HEADERS = ("case", "against the plain loop", "captured", "s")
NOTE = (
    "Outputs, gradients and buffers of some steps are compared bit for bit with the plain loop's, under "
    "deterministic algorithms; from the third step on a replay is expected. Where there is none, the third "
    "column has the obstacle.\n"
)


@dataclass(frozen=True)
class Row:
    """What is known of a case.

    Attributes:
        good: whether it went well.
        text: how it ended.
        captured: what was replayed.
        seconds: how long it took.
    """

    good: bool
    text: str
    captured: str = ""
    seconds: float = 0.0


class Process(Protocol):
    """Runs cases one after the other."""

    def next(self, seconds: float) -> list[Any] | None:
        """What it says next, ``["begin", name]`` or ``["end", name, good, text, captured]``.

        None where it has ended, or says nothing in time.
        """

    def stop(self) -> str:
        """Ends it where it has not ended; returns how it ended."""


class Child:
    """A process in a group of its own; each line that it prints is a list in JSON."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=measure.ROOT, start_new_session=True
        )
        self._said: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(line)
        self._said.put(None)

    def next(self, seconds: float) -> list[Any] | None:
        with contextlib.suppress(queue.Empty):
            line = self._said.get(timeout=max(0.0, seconds))
            return None if line is None else list(json.loads(line))
        return None

    def stop(self) -> str:
        late = self._process.poll() is None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)  # what has said its last word
            late = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        return "FAILED: not done in its time" if late else f"FAILED: its process ended with {code}"


def run_all(
    names: Sequence[str],
    seconds: float,
    start: Callable[[Sequence[str]], Process],
    keep: Callable[[str, Row], object],
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Whether all cases went well.

    Args:
        names: of the cases, in order.
        seconds: for all of them.
        start: a process for those that it is given.
        keep: takes what is known of a case, as soon as it is.
        clock: in seconds.
    """
    deadline, left, good = clock() + seconds, list(names), True
    while left and clock() < deadline:
        process, begin = start(left), clock()
        at: str | None = left[0]  # who is blamed where the process goes no further
        while left and (said := process.next(min(PATIENCE, deadline - clock()))):
            if said[0] == "begin":
                at, begin = said[1], clock()
                continue
            _, name, well, text, captured = said
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
        keep(name, Row(False, "skipped: no time was left"))
    return good and not left


def here(phase: str, names: Sequence[str]) -> None:
    """Runs cases in this process, and says how each went; ends where the device is of no use any more."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from bench.gpu_cases import PHASES as CASES

    torch.use_deterministic_algorithms(True, warn_only=True)
    cases = CASES[phase]()
    for name in names:
        say(["begin", name])
        try:
            verdict = cases[name]()
            say(["end", name, verdict.good, verdict.text, verdict.captured])
        except Exception as error:
            traceback.print_exc()
            words = " ".join(str(error).split())[:400]  # one line of a table
            say(["end", name, False, f"FAILED: {type(error).__name__}: {words}", ""])
        gc.collect()  # a pipeline's graphs keep their memory
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def say(words: list[object]) -> None:
    print(json.dumps(words), flush=True)


class Results:
    """The table of one phase, written again with every row."""

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
    parser.add_argument("name", nargs="*", help="cases, by default all")
    parser.add_argument("--here", action="store_true", help="in this process")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    wanted = parser.parse_args(arguments)
    from bench.gpu_cases import PHASES as CASES

    every = list(CASES[wanted.phase]())
    if unknown := set(wanted.name) - set(every):
        parser.error(f"no case is called {', '.join(unknown)}; there are {', '.join(every)}")
    names = wanted.name or every
    if wanted.here:
        here(wanted.phase, names)
        return
    command = [sys.executable, "-X", "faulthandler", "-m", "bench.gpu_checks", "--here", wanted.phase]
    results = Results(wanted.phase)
    good = run_all(names, wanted.seconds, lambda left: Child([*command, *left]), results.keep)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
