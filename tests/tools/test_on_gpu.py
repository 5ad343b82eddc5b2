"""The time limits and failure handling of `make gpu`, with commands that need no GPU."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from bench import measure
from tools.on_gpu import phases as on_gpu
from tools.on_gpu import sanitized
from tools.on_gpu.phases import Phase


@pytest.fixture(autouse=True)
def results_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(on_gpu, "RESULTS", tmp_path)
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(on_gpu, "KILL_DELAY", 2.0)
    return tmp_path


def python_command(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_output_is_printed_and_saved(results_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = python_command(
        "import os; print('has', os.environ['TOLD'], os.environ['OWN']); raise SystemExit(3)"
    )
    phase = Phase("phase", {"one": words, "two": python_command("print('well')")}, 1, "TOLD", {"OWN": "own"})
    assert on_gpu.run_commands(phase, 30) == {"one": 3, "two": 0}
    out = capfd.readouterr().out
    assert (results_folder / "gpu-one.txt").read_text() == "has 28 own\n"
    assert (results_folder / "gpu-two.txt").read_text() == "well\n"
    for line in ("has 28 own", "well", "phase, one: failed (3)", "phase, two: succeeded"):
        assert line in out


# Prints 'on' once its reaction to the interrupt is installed.
LATE_PROGRAM = "import signal, sys, time; signal.signal(2, {}); print('on', flush=True); time.sleep(60)"


@pytest.mark.parametrize(
    ("handler", "how", "text"),
    [
        ("lambda *_: sys.exit(print('so far'))", "interrupted at the time limit", "on\nso far\n"),
        ("signal.SIG_IGN", "killed at the time limit after ignoring the interrupt", "on\n"),
    ],
)
def test_a_late_command_is_interrupted_then_killed(
    results_folder: Path, handler: str, how: str, text: str
) -> None:
    path = results_folder / "output"
    with on_gpu._start(python_command(LATE_PROGRAM.format(handler)), path, {}) as process:
        while not path.read_text():
            time.sleep(0.01)
        assert on_gpu._wait(process, time.monotonic()) == how
    assert process.returncode is not None
    assert path.read_text() == text


def test_a_phase_leaves_later_phases_their_time_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    now, time_limits = 0.0, dict[str, float]()
    monkeypatch.setattr(on_gpu.time, "monotonic", lambda: now)

    def run_commands(phase: Phase, seconds: float) -> dict[str, int | str]:
        nonlocal now
        time_limits[phase.name] = seconds
        now += {"quick": 1.0}.get(phase.name, seconds + on_gpu.KILL_DELAY)
        return {}

    monkeypatch.setattr(on_gpu, "run_commands", run_commands)
    wanted = [Phase(name, {}, share) for name, share in (("quick", 20), ("slow", 30), ("last", 50))]
    on_gpu.run_all(wanted, 110, on_gpu.Summary([]))
    assert time_limits == {
        "quick": 30 - on_gpu.KILL_DELAY,
        "slow": 59 - on_gpu.KILL_DELAY,
        "last": 50 - on_gpu.KILL_DELAY,
    }
    assert now == pytest.approx(110)
    now = 0.0
    on_gpu.run_all(wanted, 50, on_gpu.Summary([]))  # a slow build
    assert time_limits == {
        "quick": 10 - on_gpu.KILL_DELAY,
        "slow": 49 * 30 / 80 - on_gpu.KILL_DELAY,
        "last": 49 * 50 / 80 - on_gpu.KILL_DELAY,
    }


# Each way to fail, after a line of output and one of the two files.
FAILURES = {
    "abort": ("os.abort()", r"FAILED \(-6\); so far"),
    "hang": ("time.sleep(60)", r"FAILED \(interrupted at the time limit\); KeyboardInterrupt"),
    "exception": ("raise ValueError('why')", r"FAILED \(1\); ValueError: why"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_the_summary_names_what_a_failed_phase_left(results_folder: Path, failure: str) -> None:
    statement, ended = FAILURES[failure]
    (results_folder / "two.md").touch()  # a file of an earlier run
    begin = f"import os, time, pathlib; pathlib.Path({str(results_folder)!r}, 'one.md').touch()"
    text = f"{begin}; print('so far', flush=True); {statement}"
    good = python_command("print('well')")
    wanted = [
        Phase("failing", {"bad": python_command(text)}, 1, files=["one.md", "two.*"]),
        Phase("later", {"good": good}, 1),
        Phase("never", {"unused": good}, 1),
    ]
    summary = on_gpu.Summary(wanted)
    summary.keep(wanted[0], on_gpu.run_commands(wanted[0], 5 if failure == "hang" else 60))
    summary.keep(wanted[1], on_gpu.run_commands(wanted[1], 60))
    lines = (results_folder / "gpu-summary.txt").read_text().splitlines()
    assert lines[0] == "machine: NOT RUN"
    assert re.fullmatch(f"failing, bad: {ended}", lines[1])
    assert lines[2:] == [
        "    files: gpu-bad.txt one.md",
        "    MISSING: two.*",
        "later, good: succeeded; well",
        "    files: gpu-good.txt",
        "never: NOT RUN",
    ]
    assert not summary.good


def test_all_phases_fit_into_ten_minutes_with_a_build() -> None:
    phases = on_gpu.phases()
    assert [phase.name for phase in phases] == ["models", "plans", "steps", "tests", "kernels", "sanitizer"]
    assert sum(phase.share for phase in phases) <= on_gpu.SECONDS - 60 < 540
    (tests,) = (phase for phase in phases if phase.name == "tests")
    pipelines, others = ([word for word in c if word.endswith(".py")] for c in tests.commands.values())
    # The few tests of test_cuda_steps.py come before the many of test_cuda.py.
    assert pipelines.index("tests/contracts/contract_1_same_bits/test_cuda_steps.py") < len(pipelines) - 1
    assert {"tests/unit/kernels/test_cuda.py", "tests/unit/csrc/cuda/test_random.py"} < set(others)
    assert all((on_gpu.ROOT / word).exists() for word in pipelines + others)
    assert not set(pipelines) & set(others)
    assert set(on_gpu.cuda_test_files()) <= set(pipelines + others)


# A stand-in for setup.py: "builds" an extension whose text is TEXT, in place or below --build-lib.
SETUP = """
import os, pathlib, sys
text = {text!r}
if text == "no nvcc":
    if os.environ.get("GPIPE_FAST_CUDA") == "1":
        sys.exit("needs a toolkit")
    text = "print('imports'); raise SystemExit('built without CUDA')"
lib = sys.argv[sys.argv.index("--build-lib") + 1] if "--build-lib" in sys.argv else "."
path = pathlib.Path(lib, "gpipe_fast", {name!r})
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(text)
"""
EXTENSION = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
WORKS = "print('imports'); print('has CUDA code'); print('runs')"
NO_STEP = "print('imports'); print('has CUDA code', flush=True); raise SystemExit('no step')"
NO_IMPORT = "raise SystemExit('another torch')"
HANGS = "print('imports', flush=True); import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("old", "new", "used", "summary"),
    [
        (WORKS, "never built", WORKS, "existing build used; it runs on the device"),
        (NO_IMPORT, WORKS, WORKS, "because: another torch; it runs on the device"),
        (None, NO_STEP, NO_STEP, "check failed: no step"),
        (NO_STEP, "no nvcc", NO_STEP, "BUILD FAILED (1), existing build used; check failed: no step"),
        (NO_STEP, NO_STEP, NO_STEP, "the new build is no better (no step), existing build used"),
        (HANGS, WORKS, WORKS, "because: the first step took longer than 5 s; it runs on the device"),
        (NO_IMPORT, "no nvcc", None, "BUILD FAILED (1), existing build used; check failed: another torch"),
    ],
)
def test_the_better_of_the_existing_and_the_new_extension_is_used(
    old: str | None,
    new: str,
    used: str | None,
    summary: str,
    results_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a tree with stand-ins for setup.py and the extension, whose text the check executes."""
    extension = results_folder / "gpipe_fast" / EXTENSION
    extension.parent.mkdir()
    if old:
        extension.write_text(old)
    (results_folder / "setup.py").write_text(SETUP.format(text=new, name=EXTENSION))
    (results_folder / "tools" / "on_gpu").mkdir(parents=True)
    for name in ("__init__", "on_gpu/__init__", "on_gpu/machine"):
        (results_folder / "tools" / f"{name}.py").touch()
    monkeypatch.setattr(on_gpu, "ROOT", results_folder)
    monkeypatch.setattr(on_gpu, "EXTENSION_CHECK", f"exec(open('gpipe_fast/{EXTENSION}').read())")
    monkeypatch.setattr(on_gpu, "CHECK_SECONDS", 5)
    assert on_gpu.prepare_extension(60, on_gpu.Summary([])) is (used is not None)
    assert extension.read_text() == (used or old)
    assert summary in (results_folder / "gpu-machine.txt").read_text().splitlines()[-1]


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(SystemExit, match="unknown phase: nothing"):
        on_gpu.main(["nothing"])


# Collects tests as if torchgpipe were not installed.
COLLECT_WITHOUT_TORCHGPIPE = """
import sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, *arguments):
        return None if name.partition(".")[0] == "torchgpipe" else super().find_spec(name, *arguments)
sys.meta_path[sys.meta_path.index(PathFinder)] = Without
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.extended
def test_every_cuda_test_file_is_collected_without_torchgpipe() -> None:
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "--tier=soak", "-m", "cuda", "tests"]
    command = [sys.executable, "-c", COLLECT_WITHOUT_TORCHGPIPE, *options]
    done = subprocess.run(command, cwd=on_gpu.ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    found = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert found == set(on_gpu.cuda_test_files())
    assert len(found) >= 7


# A fake sanitizer: reports errors in captured steps, and hangs as racecheck.
FAKE_SANITIZER = """#!/bin/sh
echo "$@" "$PYTORCH_NO_CUDA_MEMORY_CACHING"
case "$*" in *racecheck*) exec sleep 60;; *" captured"*) exit 9;; esac
"""


def test_sanitizer_reports_are_saved(
    results_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitized, "MIN_SECONDS", 0)
    path = results_folder / "compute-sanitizer"
    path.write_text(FAKE_SANITIZER)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(results_folder), prepend=":")
    assert sanitized.find_sanitizer() == str(path)
    assert not sanitized.run_sanitizer(str(path), 4)
    text, out = (results_folder / "sanitizer.txt").read_text(), capsys.readouterr().out
    assert text.startswith("== memcheck, smallest\n--tool memcheck")
    assert "steps smallest 1\n== memcheck, smallest: exit code 0\n" in text
    assert "steps captured \n== memcheck, captured: exit code 9\n" in text
    assert "== racecheck, smallest: exit code none, killed after" in text
    assert "--tool racecheck" in text  # racecheck was started
    assert out.count("exit code") == 5


@pytest.mark.usefixtures("one_thread")
def test_the_sanitized_steps_compute_the_right_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    for what in (sanitized.SMALLEST, sanitized.CAPTURED, sanitized.UNCAPTURED):
        sanitized.steps(what, "cpu")
        assert capsys.readouterr().out.endswith(f"{what}: gradients are right\n")
