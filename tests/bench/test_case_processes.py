"""Cases in child processes: crashes, hangs and time limits, with scripted processes and real ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from bench.case_processes import CASE_SECONDS, ChildProcess, run_cases

# Messages of a scripted process, each with its delay in seconds.
Script = Sequence[tuple[float, list[Any] | None]]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ScriptedProcess:
    """A process that sends scripted messages."""

    def __init__(self, clock: Clock, script: Script) -> None:
        self._clock, self._left = clock, list(script)

    def next(self, seconds: float) -> list[Any] | None:
        after, message = self._left[0] if self._left else (0.0, None)
        if after > seconds:
            self._clock.now += seconds
            return None
        self._left = self._left[1:]
        self._clock.now += after
        return message

    def stop(self) -> str:
        return "stopped"


def run_scripts(
    names: str, seconds: float, *scripts: Script
) -> tuple[list[str], list[list[str]], dict[str, tuple[Any, float]]]:
    """Returns the cases that did not run, the cases given to each process, and what was kept of each."""
    clock, started, kept, left = Clock(), list[list[str]](), dict[str, tuple[Any, float]](), list(scripts)

    def start(wanted: Sequence[str]) -> ScriptedProcess:
        started.append(list(wanted))
        return ScriptedProcess(clock, left.pop(0))

    def keep(name: str, found: Sequence[Any] | str, seconds: float) -> None:
        kept[name] = found, seconds

    return run_cases(list(names), seconds, start, keep, clock), started, kept


BEGIN = {name: ["begin", name] for name in "abc"}
END = {name: ["end", name, "result"] for name in "abc"}
RESULT, STOPPED = ["result"], "stopped"
A = [(1, BEGIN["a"]), (1, END["a"])]


@pytest.mark.parametrize(
    ("scripts", "not_run", "started", "kept"),
    [
        # All cases run in one process.
        ([[*A, (0, BEGIN["b"]), (3, END["b"])]], "", ["ab"], {"a": (RESULT, 1), "b": (RESULT, 3)}),
        # A new process continues after the case that ended the first.
        (
            [[*A, (0, BEGIN["b"]), (4, None)], [(1, BEGIN["c"]), (1, END["c"])]],
            "",
            ["abc", "c"],
            {"a": (RESULT, 1), "b": (STOPPED, 4), "c": (RESULT, 1)},
        ),
        # A process that ends between cases fails neither case.
        ([[*A, (0, None)], [(1, END["b"])]], "", ["ab", "b"], {"a": (RESULT, 1), "b": (RESULT, 1)}),
        # Cases fail if their process ends before they begin.
        ([[(1, None)], [(1, None)]], "", ["ab", "b"], {"a": (STOPPED, 1), "b": (STOPPED, 1)}),
        # A hanging case is stopped at its time limit; b has not failed, but the limit of all cases ended it.
        (
            [[(1, BEGIN["a"]), (1000, END["a"])], [(1, BEGIN["b"]), (1000, END["b"])]],
            "bc",
            ["abc", "bc"],
            {"a": (STOPPED, CASE_SECONDS)},
        ),
    ],
)
def test_cases_continue_in_other_processes(
    scripts: list[Script], not_run: str, started: list[str], kept: dict[str, tuple[Any, float]]
) -> None:
    found = run_scripts(started[0], 60, *scripts)
    assert found == (list(not_run), list(map(list, started)), kept)


def test_a_child_process_reports_how_it_ended() -> None:
    for ends, how in (
        ("os._exit(3)", "its process exited with 3"),
        ("time.sleep(60)", "time limit exceeded"),
        ("print('[1', end='', flush=True); os.abort()", "its process exited with -6"),
    ):
        child = ChildProcess([sys.executable, "-c", f"import os, time; print('[1]', flush=True); {ends}"])
        assert child.next(60) == [1]
        assert child.next(0.2 if "sleep" in ends else 60) is None
        assert child.stop() == f"FAILED: {how}"


def test_an_interrupted_parent_leaves_no_process() -> None:
    """Otherwise the process would use the device while others are measured."""
    child = ChildProcess([sys.executable, "-c", "import time; print('[1, 2]', flush=True); time.sleep(60)"])

    def interrupt(name: str, found: Sequence[Any] | str, seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cases(["a"], 60, lambda names: child, interrupt)
    assert child._process.returncode == -9
