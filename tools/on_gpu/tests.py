"""Runs the tests that need a GPU: `python -m tools.on_gpu.tests FILE ...`.

A child process, `python -m tools.on_gpu.tests --here`, runs them; if a test crashes it, hangs, or makes the
device unusable, a new process continues with the next test.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from bench.case_processes import connect_to_parent, run_cases

SECONDS = float(os.environ.get("GPIPE_FAST_SECONDS", "inf"))
# One broken file must not stop the others.
OPTIONS = ["-p", "no:cacheprovider", "--continue-on-collection-errors", "-m", "cuda or smoke"]
# `Messages` prints tracebacks as tests fail, because the process may not live until the summary. That of a
# hang is printed before run_cases ends the process.
RUN_OPTIONS = ["-v", "--tb=short", "--no-summary", "-o", "faulthandler_timeout=30"]


class Messages:
    """A pytest plugin that sends when tests begin and end."""

    def __init__(self, send: Callable[[Sequence[Any]], None]) -> None:
        self._send, self._outcomes = send, set[str]()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcomes.clear()
        self._send(["begin", nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes.add(report.outcome)
        if report.failed:
            print(f"\n{report.longreprtext}", flush=True)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        unusable = is_unusable()
        found = [each for each in ("failed", "skipped", "passed") if each in self._outcomes]
        self._send(["end", nodeid, "failed" if unusable or not found else found[0]])
        if unusable:
            pytest.exit("the device is unusable in this process", 1)


def is_unusable() -> bool:
    """Returns whether the device has become unusable for this process, as after an illegal access."""
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def collect(files: Sequence[str]) -> tuple[list[str], bool]:
    """Returns the names of the tests, and whether all files are good; prints what else pytest says."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *OPTIONS, *files]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    names = [line for line in lines if "::" in line and line.partition("::")[0] in files]
    print(*(line for line in lines if line not in names), sep="\n", flush=True)
    return names, done.returncode == 0


def main(files: Sequence[str]) -> None:
    deadline, counts = time.monotonic() + SECONDS, Counter[str]()
    names, good = collect(files)

    def keep(name: str, found: str, seconds: float) -> None:
        crashed = found.startswith("FAILED")
        counts["failed" if crashed else found] += 1
        if crashed:
            print(f"\n{name}: {found}, {seconds:.0f} s", flush=True)

    command = [sys.executable, "-m", "tools.on_gpu.tests", "--here"]
    not_run = run_cases(command, names, deadline - time.monotonic(), keep)
    kinds = [f"{counts[each]} {each}" for each in ("passed", "failed", "skipped")]
    print(f"{', '.join(kinds)}, {len(not_run)} not run", flush=True)
    sys.exit(0 if good and counts["passed"] and not counts["failed"] and not not_run else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        sys.exit(
            pytest.main([*OPTIONS, *RUN_OPTIONS, *sys.argv[2:]], plugins=[Messages(connect_to_parent())])
        )
    main(sys.argv[1:])
