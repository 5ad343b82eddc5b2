"""Runs the phases of `make gpu` within a time limit, most important first; phases write results as they go.

    make gpu               the first ten minutes                            files in bench/results
    machine      hardware, clocks and versions, while the extension is       gpu-machine.txt
                 built; checks that it imports and sees the device
    gpt          steps of a GPT, compared with the plain loop                gpu-gpt.md
    steps        times: everything, everything but attention and nothing     the GPU's name and date, .md
                 recomputed, beside the bare time of products and
                 attention, and beside compiled stages
    tiny         steps of tiny stages                                        ...-tiny.md

    make gpu ARGS=correct  what is right
    correct      at once: steps of each model, compared with the plain       gpu-models.md
                 loop (what is replayed, and what prevents a replay;
                 fused kernels, compared with float64); plans in flight,     gpu-plans.md
                 autocast, transports; predicted and allocated memory;       gpu-memory.md
                 the tests marked `cuda`; steps under compute-sanitizer      sanitizer.txt

    make gpu ARGS=levers   more times
    levers       each mechanism beside the step without it, wide operators   ...-levers.md

Names of other phases select these alone. A failed phase does not stop the later ones. Each phase has a share
of the time; unused time goes to the next phase. The output of COMMAND is written to `gpu-COMMAND.txt`, and
how each phase ended to `gpu-summary.txt`, or after names to `gpu-summary-NAMES.txt`. Kernels that
`python -m tools.on_gpu.precompile` has compiled elsewhere are used.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).parents[2]
RESULTS = Path(os.environ.get("GPIPE_FAST_RESULTS", ROOT / "bench" / "results"))
SECONDS = float(os.environ.get("GPIPE_FAST_GPU_SECONDS", "585"))
# Seconds from the interrupt of a late process until it is killed.
KILL_DELAY = 8.0
# Time limit in seconds for the import and one step.
CHECK_SECONDS = 60.0

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# Rows of bench.gpu: those of the first ten minutes, and others.
FIRST_ROWS = ("gpt-8", "gpt-8-except-attention", "gpt-8-never", "gpt-8-stages", "gpt-8-never-stages")
TINY_ROWS = ("tiny-never", "tiny-always")
LEVER_ROWS = ("gpt-8-levers", "llama", "gpt-wide", "gpt-8-never-captured")
# Kernels that were compiled elsewhere.
KERNELS = ROOT / "build" / "gpu" / "triton"

# Checks the extension; prints a line if it can be imported.
EXTENSION_CHECK = """
import torch, gpipe_fast
print("imports", flush=True)
assert gpipe_fast.built_with_cuda(), "built without CUDA"
pipe = gpipe_fast.GPipe(torch.nn.Sequential(torch.nn.Linear(4, 4)), [1], devices=["cuda:0"])
assert pipe(torch.ones(2, 4, device="cuda:0")).shape == (2, 4)
"""


@dataclass(frozen=True)
class Phase:
    """A phase: commands that run concurrently.

    Attributes:
        name: name of the phase.
        commands: command lines by name; the name also names the output file.
        share: minimum time in seconds; time that earlier phases left unused is added.
        environment: further environment variables.
        files: patterns of the files in `RESULTS` that it writes, beside the output of its commands.
    """

    name: str
    commands: Mapping[str, Sequence[str]]
    share: float
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[str] = ()

    def patterns(self) -> list[str]:
        """Returns patterns of all files that the phase should write."""
        return [*(f"gpu-{name}.txt" for name in self.commands), *self.files]


def cuda_test_files() -> list[str]:
    """Returns the test files with `cuda` tests; collecting all other files would take too long."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in found if "pytest.mark.cuda" in path.read_text()]


def module(name: str, *arguments: str) -> list[str]:
    """Returns the command line of a module."""
    return [sys.executable, "-m", name, *arguments]


def correctness() -> Phase:
    """Returns the phase of comparisons and tests, which run at once."""
    contract = "tests/contracts/contract_1_same_bits"
    files = {
        "first": ["tests/unit/test_smoke.py", f"{contract}/test_cuda_steps.py"],
        "pipelines": [f"{contract}/test_cuda.py"],
    }
    numerics = "tests/unit/kernels/test_numerics.py"
    known = {numerics, *itertools.chain(*files.values())}
    files["others"] = [path for path in cuda_test_files() if path not in known]

    checks, tests = "tools.on_gpu.checks", "tools.on_gpu.tests"
    correct = {name: module(checks, name) for name in ("models", "plans", "memory")}
    correct |= {name: module(tests, *paths) for name, paths in files.items()}
    # Each test starts a process that compiles for half a minute.
    workers = ("-n", "6") if importlib.util.find_spec("xdist") else ()
    correct |= {"numerics": module("pytest", "-q", "--tb=short", *workers, "-m", "cuda", numerics)}
    correct |= {"sanitizer": module("tools.on_gpu.sanitized")}
    written = ["gpu-models.md", "gpu-plans.md", "gpu-memory.md", "sanitizer.txt"]
    return Phase("correct", correct, 465, DETERMINISTIC, written)


def commands() -> dict[str, list[Phase]]:
    """Returns the phases of each command in order, with their time shares; the first one is the default."""

    def rows(phase: str, share: float, names: Sequence[str], suffix: str = "") -> Phase:
        options = ("--suffix", suffix) if suffix else ()
        written = f"*-20??-??-??{f'-{suffix}' if suffix else ''}.md"
        return Phase(phase, {phase: module("bench.gpu.cuda", *names, *options)}, share, files=[written])

    gpt = module("tools.on_gpu.checks", "models", "gpt", "gpt, fused kernels", "--file", "gpu-gpt")
    return {
        "first": [
            Phase("gpt", {"gpt": gpt}, 50, DETERMINISTIC, ["gpu-gpt.md"]),
            rows("steps", 330, FIRST_ROWS),
            rows("tiny", 40, TINY_ROWS, "tiny"),
        ],
        "correct": [correctness()],
        "levers": [rows("levers", 405, LEVER_ROWS, "levers")],
    }


def phases(names: Sequence[str] = ()) -> list[Phase]:
    """Returns the phases of the named commands, and the named phases; by default those of the first command.

    Raises:
        SystemExit: a name is unknown.
    """
    every = commands()
    known = every | {
        phase.name: [phase] for own in every.values() for phase in own if phase.name not in every
    }
    if unknown := set(names) - known.keys():
        sys.exit(f"unknown phase: {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    return [phase for name in names or [next(iter(every))] for phase in known[name]]


def prepare_extension(seconds: float, summary: Summary) -> bool:
    """Returns whether an extension can be imported; records the machine.

    If the existing extension does not work, one is built in its place; a failed build leaves it.
    """
    begin, (imports, problem) = time.monotonic(), check_extension()
    commands, took = {"machine": module("tools.on_gpu.machine")}, "existing build used"
    if problem:
        print(f"build: {problem}", flush=True)
        setup = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        commands["build"] = [*setup, "--build-temp", str(ROOT / "build" / "gpu" / "objects")]
    environment = {"MAX_JOBS": str(os.cpu_count() or 1), "GPIPE_FAST_CUDA": "1"}
    phase = Phase("machine", commands, seconds, environment=environment)
    codes = run_commands(phase, seconds)
    if problem:
        how = f"BUILD FAILED ({codes['build']})" if codes["build"] else "rebuilt"
        took = f"{how} in {time.monotonic() - begin:.0f} s, because: {problem}"
        imports, problem = check_extension()
    line = f"extension: {took}; {f'check failed: {problem}' if problem else 'it runs on the device'}"
    print(line, flush=True)
    with (RESULTS / "gpu-machine.txt").open("a") as file:
        file.write(f"{line}\n")
    summary.keep(phase, codes)
    return imports


def check_extension() -> tuple[bool, str]:
    """Returns whether the extension can be imported, and why it does not run on the device, if so."""
    command = [sys.executable, "-c", EXTENSION_CHECK]
    try:
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired as error:
        return bool(error.stdout), f"the first step took longer than {CHECK_SECONDS:g} s"
    problem = "" if process.returncode == 0 else (process.stderr.strip().splitlines() or ["?"])[-1]
    return bool(process.stdout), problem


def run_commands(phase: Phase, seconds: float) -> dict[str, int | str]:
    """Runs a phase and returns each command's exit code or failure; output is also written to files."""
    print(f"{phase.name}: {seconds:.0f} s", flush=True)
    deadline = time.monotonic() + seconds
    RESULTS.mkdir(exist_ok=True)
    variables = {"GPIPE_FAST_SECONDS": f"{max(1.0, seconds - 2):.0f}", "PYTHONUNBUFFERED": "1"}
    environment = {**os.environ, **phase.environment, **variables}
    with contextlib.ExitStack() as stack:
        started = {
            name: stack.enter_context(_start(command, RESULTS / f"gpu-{name}.txt", environment))
            for name, command in phase.commands.items()
        }
        codes = {name: _wait(process, deadline) for name, process in started.items()}
    for name, code in codes.items():
        print(f"{phase.name}, {name}: {'succeeded' if code == 0 else f'failed ({code})'}", flush=True)
    return codes


@contextlib.contextmanager
def _start(
    command: Sequence[str], path: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a process in its own process group and copies its output to stdout and a file."""
    with path.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        copying = threading.Thread(target=_copy, args=(process.stdout, file), daemon=True)
        copying.start()
        try:
            yield process
        finally:
            _wait(process, 0.0)  # an interrupted process ends its children, which may be in other groups
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            copying.join(KILL_DELAY)


def _copy(source: BinaryIO, file: BinaryIO) -> None:
    for line in source:
        file.write(line)
        file.flush()
        with contextlib.suppress(OSError):  # whoever reads stdout may have ended
            sys.stdout.write(line.decode(errors="replace"))
            sys.stdout.flush()


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | str:
    """Returns the exit code. Interrupts a late process, so that it can report its findings, then kills it."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(KILL_DELAY)
        return "interrupted at the time limit"
    except subprocess.TimeoutExpired:
        return "killed at the time limit after ignoring the interrupt"


class Summary:
    """How each phase ended, and the files that it wrote; a file that is rewritten after every phase."""

    def __init__(self, wanted: Sequence[Phase], name: str = "gpu-summary") -> None:
        self._name = name
        self._lines = {name: f"{name}: NOT RUN" for name in ("machine", *(phase.name for phase in wanted))}
        RESULTS.mkdir(exist_ok=True)
        self._before = _modification_times()
        self.good = True

    def keep(self, phase: Phase, codes: Mapping[str, int | str]) -> None:
        now = _modification_times()
        written = {name for name, time in now.items() if self._before.get(name) != time}
        lines = []
        for name, code in codes.items():
            output = (RESULTS / f"gpu-{name}.txt").read_text(errors="replace").strip().splitlines()
            ended = "succeeded" if code == 0 else f"FAILED ({code})"
            lines.append(f"{phase.name}, {name}: {ended}; {output[-1][:160] if output else 'no output'}")
        found = {pattern: fnmatch.filter(written, pattern) for pattern in phase.patterns()}
        lines.append(f"    files: {' '.join(sorted(name for names in found.values() for name in names))}")
        if missing := [pattern for pattern, names in found.items() if not names]:
            lines.append(f"    MISSING: {' '.join(missing)}")
        self._lines[phase.name] = "\n".join(lines)
        self.good = self.good and not missing and not any(codes.values())
        self.write()

    def write(self) -> str:
        text = "\n".join(self._lines.values())
        (RESULTS / f"{self._name}.txt").write_text(f"{text}\n")
        return text


def _modification_times() -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in RESULTS.glob("*") if path.is_file()}


def run_all(wanted: Sequence[Phase], seconds: float, summary: Summary) -> None:
    """Runs the phases; each phase preserves the shares of later ones."""
    deadline = time.monotonic() + seconds
    for index, phase in enumerate(wanted):
        later = sum(each.share for each in wanted[index + 1 :])
        left = deadline - time.monotonic()
        # If the build took too long, all phases get proportionally less.
        share = max(left - later, left * phase.share / (phase.share + later)) - KILL_DELAY
        summary.keep(phase, run_commands(phase, max(1.0, share)))


def use_compiled_kernels(folder: Path) -> None:
    """Makes a folder of compiled kernels the disk cache, wherever it was made: its files name whole paths."""
    os.environ.setdefault("GPIPE_FAST_CACHE", str(folder))
    for path in folder.glob("*/__grp__*.json"):
        group = json.loads(path.read_text())
        files = {name: str(path.with_name(Path(old).name)) for name, old in group["child_paths"].items()}
        path.write_text(json.dumps(group | {"child_paths": files}))


def main(names: Sequence[str] = ()) -> None:
    begin, wanted = time.monotonic(), phases(names)
    summary = Summary(wanted, "-".join(["gpu-summary", *names]))
    use_compiled_kernels(KERNELS)
    if not prepare_extension(SECONDS / 2, summary):
        sys.exit("build: no extension can be imported, so nothing can run")
    run_all(wanted, SECONDS - (time.monotonic() - begin), summary)
    verdict = "all succeeded" if summary.good else "some failed"
    print(f"\n{summary.write()}\nfinished in {time.monotonic() - begin:.0f} s: {verdict}", flush=True)
    sys.exit(0 if summary.good else 1)
