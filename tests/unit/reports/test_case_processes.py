"""Cases in child processes: crashes, hangs and time limits, with scripted processes and real ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from gpipe_fast.reports.case_processes import CASE_SECONDS, ChildProcess, run_cases

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


def end_message(name: str) -> list[Any]:
    return ["end", name, "result"]


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


def test_all_cases_run_in_one_process() -> None:
    script = [(5, ["begin", "a"]), (2, end_message("a")), (0, ["begin", "b"]), (3, end_message("b"))]
    not_run, started, kept = run_scripts("ab", 60, script)
    assert not_run == []
    assert started == [["a", "b"]]
    assert kept == {"a": (["result"], 2), "b": (["result"], 3)}


def test_a_new_process_continues_after_the_case_that_ended_the_first() -> None:
    first: Script = [(1, ["begin", "a"]), (1, end_message("a")), (0, ["begin", "b"]), (4, None)]
    not_run, started, kept = run_scripts("abc", 60, first, [(1, ["begin", "c"]), (1, end_message("c"))])
    assert not_run == []
    assert started == [["a", "b", "c"], ["c"]]
    assert kept["b"] == ("stopped", 4)
    assert kept["c"] == (["result"], 1)


def test_a_process_that_ends_between_cases_fails_neither_case() -> None:
    not_run, started, kept = run_scripts(
        "ab", 60, [(1, ["begin", "a"]), (1, end_message("a")), (0, None)], [(1, end_message("b"))]
    )
    assert not_run == []
    assert started == [["a", "b"], ["b"]]
    assert kept == {"a": (["result"], 1), "b": (["result"], 1)}


def test_cases_fail_if_their_process_ends_before_they_begin() -> None:
    not_run, started, kept = run_scripts("ab", 60, [(1, None)], [(1, None)])
    assert not_run == []
    assert started == [["a", "b"], ["b"]]
    assert kept == {"a": ("stopped", 1), "b": ("stopped", 1)}


def test_a_hanging_case_is_stopped_at_its_time_limit() -> None:
    hangs: Script = [(1, ["begin", "a"]), (1000, end_message("a"))]
    not_run, started, kept = run_scripts("abc", 60, hangs, [(1, ["begin", "b"]), (1000, end_message("b"))])
    assert not_run == ["b", "c"], "b has not failed: the time limit of all cases has ended it"
    assert started == [["a", "b", "c"], ["b", "c"]]
    assert kept == {"a": ("stopped", CASE_SECONDS)}


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


OTHER_OUTPUT = """
from gpipe_fast.reports.case_processes import connect_to_parent
send = connect_to_parent()
print("not a message")
send(["begin", "a"])
"""


def test_other_output_is_not_taken_for_a_message(capfd: pytest.CaptureFixture[str]) -> None:
    child = ChildProcess([sys.executable, "-c", OTHER_OUTPUT])
    assert child.next(60) == ["begin", "a"]
    assert child.next(60) is None
    assert capfd.readouterr().err == "not a message\n"
