"""Cases in child processes: crashes, hangs and time limits."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from bench import case_processes
from bench.case_processes import ChildProcess, run_cases

CHILD = """
import json, os, sys, time
for name in sys.argv[1:]:
    if name == "early": os._exit(2)
    print(json.dumps(["begin", name]), flush=True)
    if name == "crash": os.abort()
    if name == "half": print("[1", end="", flush=True); os._exit(3)
    if name == "hang": time.sleep(60)
    print(json.dumps(["end", name, "result"]), flush=True)
    if name == "leave": os._exit(0)
"""
COMMAND = [sys.executable, "-c", CHILD]


def kept_of(names: list[str], seconds: float, case_seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Returns what was kept of each case, and the cases that did not run."""
    kept: dict[str, Any] = {}
    left = run_cases(COMMAND, names, seconds, lambda name, found, _: kept.update({name: found}), case_seconds)
    return kept, left


def test_a_new_process_continues_after_the_case_that_ended_the_last_one() -> None:
    exited = "FAILED: its process exited with"
    expected = {
        **{
            "a": "result",
            "crash": f"{exited} -6",
            "half": f"{exited} 3",
            "hang": "FAILED: time limit exceeded",
        },
        **{"leave": "result", "b": "result", "early": f"{exited} 2"},
    }
    assert kept_of([*expected], 600, 5) == (expected, [])


def test_the_limit_of_all_cases_fails_none() -> None:
    assert kept_of(["a", "hang", "b"], 3, 600) == ({"a": "result"}, ["hang", "b"])


def test_an_interrupted_parent_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the process would use the device while others are measured."""
    child = ChildProcess([*COMMAND, "a", "hang"])
    monkeypatch.setattr(case_processes, "ChildProcess", lambda command: child)

    def interrupt(name: str, found: str, seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cases([], ["a"], 60, interrupt)
    assert child._process.returncode == -9
