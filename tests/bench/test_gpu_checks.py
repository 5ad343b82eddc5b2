"""Small cases that `make gpu` runs first: here on GPUs that are not there, and with a clock of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_machine, measure
from bench.gpu_checks import PATIENCE, Child, Results, Row, run_all
from tests.fake_cuda.build import can_build

# Words that a process of the tests says, after so many seconds.
Script = Sequence[tuple[float, list[Any] | None]]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """A process that says what the test says."""

    def __init__(self, clock: Clock, script: Script) -> None:
        self._clock, self._left = clock, list(script)

    def next(self, seconds: float) -> list[Any] | None:
        after, said = self._left[0] if self._left else (0.0, None)
        if after > seconds:
            self._clock.now += seconds
            return None
        self._left = self._left[1:]
        self._clock.now += after
        return said

    def stop(self) -> str:
        return "stopped"


def told(name: str, good: bool = True) -> list[Any]:
    return ["end", name, good, "equal", "replayed"]


def ran(names: str, seconds: float, *scripts: Script) -> tuple[bool, list[list[str]], dict[str, Row]]:
    """How cases went, what each process was started for, and what was kept."""
    clock, started, kept, left = Clock(), list[list[str]](), dict[str, Row](), list(scripts)

    def start(wanted: Sequence[str]) -> Scripted:
        started.append(list(wanted))
        return Scripted(clock, left.pop(0))

    good = run_all(list(names), seconds, start, kept.__setitem__, clock)
    return good, started, kept


def test_all_in_one_process() -> None:
    script = [(5, ["begin", "a"]), (2, told("a")), (0, ["begin", "b"]), (3, told("b"))]
    good, started, kept = ran("ab", 60, script)
    assert good
    assert started == [["a", "b"]]
    assert kept == {"a": Row(True, "equal", "replayed", 2), "b": Row(True, "equal", "replayed", 3)}


def test_the_next_process_goes_on_behind_what_ended_the_first() -> None:
    first: Script = [(1, ["begin", "a"]), (1, told("a")), (0, ["begin", "b"]), (4, None)]
    good, started, kept = ran("abc", 60, first, [(1, ["begin", "c"]), (1, told("c"))])
    assert not good
    assert started == [["a", "b", "c"], ["c"]]
    assert kept["b"] == Row(False, "stopped", "", 4)
    assert kept["c"].good


def test_a_process_that_ends_between_two_cases_is_nobodys_fault() -> None:
    good, started, kept = ran(
        "ab", 60, [(1, ["begin", "a"]), (1, told("a", False)), (0, None)], [(1, told("b"))]
    )
    assert not good
    assert started == [["a", "b"], ["b"]]
    assert kept["a"].text == kept["b"].text == "equal"


def test_processes_that_never_begin_come_to_an_end() -> None:
    good, started, kept = ran("ab", 60, [(1, None)], [(1, None)])
    assert not good
    assert started == [["a", "b"], ["b"]]
    assert [row.text for row in kept.values()] == ["stopped", "stopped"]


def test_what_hangs_takes_no_more_than_its_time() -> None:
    hangs: Script = [(1, ["begin", "a"]), (1000, told("a"))]
    good, started, kept = ran("abc", 60, hangs, [(1, ["begin", "b"]), (1000, told("b"))])
    assert not good
    assert started == [["a", "b", "c"], ["b", "c"]]
    assert kept["a"].seconds == PATIENCE
    assert kept["b"].seconds == 60 - 1 - PATIENCE - 1
    assert kept["c"] == Row(False, "skipped: no time left")


def test_a_row_is_written_as_soon_as_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    results = Results("plans")
    results.keep("one", Row(True, "equal", "forward", 1.5))
    assert "| one    | equal" in (tmp_path / "gpu-plans.md").read_text()
    results.keep("another", Row(False, "FAILED: why"))
    text = (tmp_path / "gpu-plans.md").read_text()
    assert "| one " in text
    assert "FAILED: why" in text


def test_a_process_says_how_it_ended() -> None:
    for ends, how in (
        ("os._exit(3)", "its process exited with 3"),
        ("time.sleep(60)", "time limit exceeded"),
    ):
        child = Child([sys.executable, "-c", f"import os, time; print('[1]', flush=True); {ends}"])
        assert child.next(60) == [1]
        assert child.next(0.2 if "sleep" in ends else 60) is None
        assert child.stop() == f"FAILED: {how}"


def test_what_the_machine_has(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> str:
        raise OSError("not today")

    monkeypatch.setitem(gpu_machine.FACTS, "driver", fail)
    gpu_machine.main()
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == list(gpu_machine.FACTS)
    assert lines["driver"] == "FAILED: OSError: not today"
    assert "torch 2." in lines["packages"]


# What Python runs first in every process; those that compute need the operators.
EVERYWHERE = """
import sys
if "--here" in sys.orig_argv or "built_with_cuda" in sys.orig_argv[-1]:
    import tests.fake_cuda.plugin
"""
# `make gpu` up to its third phase, with few cases.
FEW = """
import sys
from bench import on_gpu
from bench.on_gpu import Part
checks = [sys.executable, "-m", "bench.gpu_checks"]
plans = ["two shapes in flight, last goes back first"]
on_gpu.parts = lambda: [
    Part("models", {"models": [*checks, "models", "gpt"]}, 200),
    Part("plans", {"plans": [*checks, "plans", *plans]}, 200),
]
on_gpu.main()
"""


@pytest.mark.extended
@pytest.mark.skipif(not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers")
def test_the_first_phases_on_gpus_that_are_not_there(libraries: tuple[Path, Path], tmp_path: Path) -> None:
    runtime, operators = libraries
    (tmp_path / "sitecustomize.py").write_text(EVERYWHERE)
    variables = {
        "LD_PRELOAD": str(runtime),
        "FAKE_CUDA_LOG": os.devnull,
        "FAKE_CUDA_OPERATORS": str(operators),
        "GPIPE_FAST_RESULTS": str(tmp_path),
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{measure.ROOT}",
    }
    command = [sys.executable, "-W", "ignore", "-c", FEW]
    done = subprocess.run(
        command, env=os.environ | variables, cwd=measure.ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    machine = (tmp_path / "gpu-machine.txt").read_text()
    assert "Fake GPU" in machine
    assert "extension: existing build used; imports and runs on the device" in machine
    for phase, replays in (("models", 3), ("plans", 5)):
        row = (tmp_path / f"gpu-{phase}.md").read_text().splitlines()[-1]
        assert row.split("|")[2].strip() == "equal", row
        assert f"{replays} mini-batches replayed" in row
