"""The small cases that `make gpu` runs first: on the fake CUDA runtime, and with a simulated clock."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_machine, measure
from bench.gpu_checks import CASE_SECONDS, ChildProcess, Results, Row, run_all
from tests.fake_cuda.build import can_build

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


def end_message(name: str, good: bool = True) -> list[Any]:
    return ["end", name, good, "equal", "replayed"]


def run_scripts(names: str, seconds: float, *scripts: Script) -> tuple[bool, list[list[str]], dict[str, Row]]:
    """Returns whether all cases passed, the cases given to each process, and the rows that were kept."""
    clock, started, kept, left = Clock(), list[list[str]](), dict[str, Row](), list(scripts)

    def start(wanted: Sequence[str]) -> ScriptedProcess:
        started.append(list(wanted))
        return ScriptedProcess(clock, left.pop(0))

    good = run_all(list(names), seconds, start, kept.__setitem__, clock)
    return good, started, kept


def test_all_cases_run_in_one_process() -> None:
    script = [(5, ["begin", "a"]), (2, end_message("a")), (0, ["begin", "b"]), (3, end_message("b"))]
    good, started, kept = run_scripts("ab", 60, script)
    assert good
    assert started == [["a", "b"]]
    assert kept == {"a": Row(True, "equal", "replayed", 2), "b": Row(True, "equal", "replayed", 3)}


def test_a_new_process_continues_after_the_case_that_ended_the_first() -> None:
    first: Script = [(1, ["begin", "a"]), (1, end_message("a")), (0, ["begin", "b"]), (4, None)]
    good, started, kept = run_scripts("abc", 60, first, [(1, ["begin", "c"]), (1, end_message("c"))])
    assert not good
    assert started == [["a", "b", "c"], ["c"]]
    assert kept["b"] == Row(False, "stopped", "", 4)
    assert kept["c"].good


def test_a_process_that_ends_between_cases_fails_neither_case() -> None:
    good, started, kept = run_scripts(
        "ab", 60, [(1, ["begin", "a"]), (1, end_message("a", False)), (0, None)], [(1, end_message("b"))]
    )
    assert not good
    assert started == [["a", "b"], ["b"]]
    assert kept["a"].text == kept["b"].text == "equal"


def test_cases_fail_if_their_process_ends_before_they_begin() -> None:
    good, started, kept = run_scripts("ab", 60, [(1, None)], [(1, None)])
    assert not good
    assert started == [["a", "b"], ["b"]]
    assert [row.text for row in kept.values()] == ["stopped", "stopped"]


def test_a_hanging_case_is_stopped_at_its_time_limit() -> None:
    hangs: Script = [(1, ["begin", "a"]), (1000, end_message("a"))]
    good, started, kept = run_scripts("abc", 60, hangs, [(1, ["begin", "b"]), (1000, end_message("b"))])
    assert not good
    assert started == [["a", "b", "c"], ["b", "c"]]
    assert kept["a"].seconds == CASE_SECONDS
    assert kept["b"].seconds == 60 - 1 - CASE_SECONDS - 1
    assert kept["c"] == Row(False, "skipped: no time left")


def test_every_row_is_written_immediately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    results = Results("plans")
    results.keep("one", Row(True, "equal", "forward", 1.5))
    assert "| one    | equal" in (tmp_path / "gpu-plans.md").read_text()
    results.keep("another", Row(False, "FAILED: why"))
    text = (tmp_path / "gpu-plans.md").read_text()
    assert "| one " in text
    assert "FAILED: why" in text


def test_a_child_process_reports_how_it_ended() -> None:
    for ends, how in (
        ("os._exit(3)", "its process exited with 3"),
        ("time.sleep(60)", "time limit exceeded"),
    ):
        child = ChildProcess([sys.executable, "-c", f"import os, time; print('[1]', flush=True); {ends}"])
        assert child.next(60) == [1]
        assert child.next(0.2 if "sleep" in ends else 60) is None
        assert child.stop() == f"FAILED: {how}"


def test_gpu_machine_prints_every_fact_even_if_one_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> str:
        raise OSError("not today")

    monkeypatch.setitem(gpu_machine.FACTS, "driver", fail)
    gpu_machine.main()
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == list(gpu_machine.FACTS)
    assert lines["driver"] == "FAILED: OSError: not today"
    assert "torch 2." in lines["packages"]


# Runs at the start of every Python process; loads the fake operators in processes that compute.
SITECUSTOMIZE = """
import sys
if "--here" in sys.orig_argv or "built_with_cuda" in sys.orig_argv[-1]:
    import tests.fake_cuda.plugin
"""
# `make gpu` with only the first phases and few cases.
FEW_CASES = """
import sys
from bench import on_gpu
from bench.on_gpu import Phase
checks = [sys.executable, "-m", "bench.gpu_checks"]
plans = ["two shapes in flight, last goes back first"]
on_gpu.phases = lambda: [
    Phase("models", {"models": [*checks, "models", "gpt"]}, 200),
    Phase("plans", {"plans": [*checks, "plans", *plans]}, 200),
]
on_gpu.main()
"""


@pytest.mark.extended
@pytest.mark.skipif(not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers")
def test_the_first_phases_run_on_the_fake_cuda_runtime(libraries: tuple[Path, Path], tmp_path: Path) -> None:
    runtime, operators = libraries
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    variables = {
        "LD_PRELOAD": str(runtime),
        "FAKE_CUDA_LOG": os.devnull,
        "FAKE_CUDA_OPERATORS": str(operators),
        "GPIPE_FAST_RESULTS": str(tmp_path),
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{measure.ROOT}",
    }
    command = [sys.executable, "-W", "ignore", "-c", FEW_CASES]
    process = subprocess.run(
        command, env=os.environ | variables, cwd=measure.ROOT, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stdout + process.stderr[-3000:]
    machine = (tmp_path / "gpu-machine.txt").read_text()
    assert "Fake GPU" in machine
    assert "extension: existing build used; imports and runs on the device" in machine
    for phase, replays in (("models", 3), ("plans", 5)):
        row = (tmp_path / f"gpu-{phase}.md").read_text().splitlines()[-1]
        assert row.split("|")[2].strip() == "equal", row
        assert f"{replays} mini-batches replayed" in row
