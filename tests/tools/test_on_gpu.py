"""The time limits and failure handling of `make gpu`, with commands that need no GPU."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from bench import measure
from bench.gpu.subjects import ROWS
from tools.on_gpu import phases as on_gpu
from tools.on_gpu import precompile, sanitized
from tools.on_gpu.phases import Phase


@pytest.fixture(autouse=True)
def results_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(on_gpu, "RESULTS", tmp_path)
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(on_gpu, "KILL_DELAY", 2.0)
    return tmp_path


def python_command(text: str) -> list[str]:
    return [sys.executable, "-c", text]


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


def test_the_summary_names_what_a_failed_phase_left(results_folder: Path) -> None:
    (results_folder / "two.md").touch()  # a file of an earlier run
    begin = f"import os, pathlib; pathlib.Path({str(results_folder)!r}, 'one.md').touch()"
    bad = python_command(f"{begin}; print('so far', flush=True); os.abort()")
    good = python_command("import os; print('well', os.environ['OWN'])")
    wanted = [
        Phase("failing", {"bad": bad}, 1, files=["one.md", "two.*"]),
        Phase("later", {"good": good}, 1, environment={"OWN": "own"}),
        Phase("never", {"unused": good}, 1),
    ]
    summary = on_gpu.Summary(wanted)
    for phase in wanted[:2]:
        summary.keep(phase, on_gpu.run_commands(phase, 60))
    assert (results_folder / "gpu-summary.txt").read_text().splitlines() == [
        "machine: NOT RUN",
        "failing, bad: FAILED (-6); so far",
        "    files: gpu-bad.txt one.md",
        "    MISSING: two.*",
        "later, good: succeeded; well own",
        "    files: gpu-good.txt",
        "never: NOT RUN",
    ]
    assert not summary.good


def test_all_phases_fit_into_ten_minutes_with_a_build() -> None:
    commands = on_gpu.commands()
    assert list(commands) == ["first", "correct", "levers"]
    for own in commands.values():
        assert sum(phase.share for phase in own) <= on_gpu.SECONDS - 120 < 480
    assert sorted([*on_gpu.FIRST_ROWS, *on_gpu.TINY_ROWS, *on_gpu.LEVER_ROWS]) == sorted(ROWS)
    names = [name for own in commands.values() for phase in own for name in phase.commands]
    assert len(names) == len(set(names))  # each writes a file
    phases = on_gpu.phases(["correct"])
    paths = {
        name: [word for word in command if word.endswith(".py")]
        for name, command in phases[0].commands.items()
    }
    every = [path for own in paths.values() for path in own]
    assert len(every) == len(set(every))
    assert set(on_gpu.cuda_test_files()) <= set(every)
    assert all((on_gpu.ROOT / path).exists() for path in every)
    assert "tests/unit/csrc/cuda/test_random.py" in paths["others"]


def test_the_first_command_is_the_default_and_phases_have_names() -> None:
    order = ["gpt", "steps", "tiny"]
    assert [phase.name for phase in on_gpu.phases()] == order
    assert [phase.name for phase in on_gpu.phases(["steps", "correct"])] == ["steps", "correct"]
    with pytest.raises(SystemExit, match="unknown phase: speed; choose from first, correct, levers, gpt"):
        on_gpu.phases(["speed"])


def test_compiled_kernels_are_found_where_the_tree_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPIPE_FAST_CACHE", "given")
    (tmp_path / "KEY").mkdir()
    group = tmp_path / "KEY" / "__grp__mine.json"
    group.write_text(json.dumps({"child_paths": {"mine.cubin": "/elsewhere/KEY/mine.cubin"}}))
    on_gpu.use_compiled_kernels(tmp_path)
    found = json.loads(group.read_text())["child_paths"]
    assert found == {"mine.cubin": str(tmp_path / "KEY" / "mine.cubin")}
    assert os.environ["GPIPE_FAST_CACHE"] == "given"


# A stand-in for setup.py: "builds" an extension whose text is TEXT, in place.
SETUP = """
import os, pathlib, sys
assert os.environ["GPIPE_FAST_CUDA"] == "1" and "--inplace" in sys.argv
if {text!r} == "no nvcc":
    sys.exit("needs a toolkit")
pathlib.Path("extension").write_text({text!r})
"""
WORKS = "print('imports')"
NO_STEP = "print('imports', flush=True); raise SystemExit('no step')"
NO_IMPORT = "raise SystemExit('another torch')"


@pytest.mark.parametrize(
    ("old", "new", "imports", "summary"),
    [
        (WORKS, "never built", True, "existing build used; it runs on the device"),
        (NO_IMPORT, WORKS, True, "because: another torch; it runs on the device"),
        (NO_STEP, NO_STEP, True, "because: no step; check failed: no step"),
        (NO_IMPORT, "no nvcc", False, "because: another torch; check failed: another torch"),
    ],
)
def test_an_extension_that_does_not_work_is_built_again(
    old: str, new: str, imports: bool, summary: str, results_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a tree with stand-ins for setup.py and the extension, whose text the check executes."""
    (results_folder / "extension").write_text(old)
    (results_folder / "setup.py").write_text(SETUP.format(text=new))
    (results_folder / "tools" / "on_gpu").mkdir(parents=True)
    for name in ("__init__", "on_gpu/__init__", "on_gpu/machine"):
        (results_folder / "tools" / f"{name}.py").touch()
    monkeypatch.setattr(on_gpu, "ROOT", results_folder)
    monkeypatch.setattr(on_gpu, "EXTENSION_CHECK", "exec(open('extension').read())")
    assert on_gpu.prepare_extension(60, on_gpu.Summary([])) is imports
    assert summary in (results_folder / "gpu-machine.txt").read_text().splitlines()[-1]


@pytest.mark.usefixtures("one_thread")
def test_the_sanitized_steps_compute_the_right_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    for what in (sanitized.SMALLEST, sanitized.CAPTURED, sanitized.UNCAPTURED):
        sanitized.steps(what, "cpu")
        assert capsys.readouterr().out.endswith(f"{what}: gradients are right\n")


@pytest.mark.extended
def test_kernels_are_compiled_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPIPE_FAST_CACHE", str(tmp_path))
    assert precompile.main(["tiny-never"])
    names = [path.name for path in tmp_path.glob("*/threshold_backward_*.cubin")]
    assert len(names) == 2  # for aligned pointers and for any
    assert len(set(names)) == 1
