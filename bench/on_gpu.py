"""Runs the phases of `make gpu` within a time limit, most important first; phases write results as they go.

    phase        contents                                                  files in bench/results
    machine      hardware and versions, while the extension is built;      gpu-machine.txt
                 checks that it imports and sees the device
    models       several steps of each model, compared with the plain      gpu-models.md
                 loop: what is replayed, and what prevents a replay
    plans        plans in flight, memory, autocast, transports             gpu-plans.md
    steps        compared with checkpointed loops, torchgpipe and          the GPU's name and date, .md, .json
                 torch.compile
    tests        the tests marked `cuda`                                   gpu-pipelines.txt, gpu-others.txt
    kernels      compared with eager PyTorch, Inductor and Liger-Kernel    kernels.md
    sanitizer    steps under compute-sanitizer                             sanitizer.txt

`python -m bench.on_gpu [phase ...]` runs the named phases only. A failed phase does not stop the later ones.
Each phase has a share of the time; unused time goes to the next phase. The output of COMMAND is written to
`gpu-COMMAND.txt`.
"""

from __future__ import annotations

import contextlib
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

ROOT = Path(__file__).parents[1]
RESULTS = Path(os.environ.get("GPIPE_FAST_RESULTS", ROOT / "bench" / "results"))
SECONDS = float(os.environ.get("GPIPE_FAST_GPU_SECONDS", "585"))
# Seconds from the interrupt of a late process until it is killed.
KILL_DELAY = 8.0
# Time limit in seconds for the import and one step.
CHECK_SECONDS = 60.0

# Tests whether an existing extension works with this Python and torch; otherwise it is rebuilt.
EXTENSION_CHECK = """
import torch, gpipe_fast
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
        seconds_variable: environment variable that passes the time limit to the commands.
        environment: further environment variables.
    """

    name: str
    commands: Mapping[str, Sequence[str]]
    share: float
    seconds_variable: str = "GPIPE_FAST_SECONDS"
    environment: Mapping[str, str] = field(default_factory=dict)


def pytest(*arguments: str) -> list[str]:
    """Returns a pytest command that prints each test's name before it runs, and tracebacks of hangs."""
    options = ["-v", "-ra", "--tb=short", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    options.append("--continue-on-collection-errors")  # one broken file must not stop the others
    return [sys.executable, "-m", "pytest", *options, "-m", "cuda or smoke", *arguments]


def cuda_test_files() -> list[str]:
    """Returns the test files with `cuda` tests; collecting all other files would take too long."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in found if "pytest.mark.cuda" in path.read_text()]


def phases() -> list[Phase]:
    """Returns the phases in order, with their time shares."""
    pipelines = [
        "tests/unit/test_smoke.py",
        "tests/equivalence/test_cuda_steps.py",
        "tests/equivalence/test_cuda.py",
    ]
    others = [path for path in cuda_test_files() if path not in pipelines]
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    module = [sys.executable, "-m"]
    return [
        Phase("models", {"models": [*module, "bench.gpu_checks", "models"]}, 50),
        Phase("plans", {"plans": [*module, "bench.gpu_checks", "plans"]}, 60),
        Phase("steps", {"cuda": [*module, "bench.cuda"]}, 205, "GPIPE_FAST_BENCH_SECONDS"),
        # Pipeline tests have their own process: after a CUDA error, the GPU is unusable for the whole
        # process.
        Phase(
            "tests",
            {"pipelines": pytest(*pipelines), "others": pytest(*others)},
            70,
            environment=deterministic,
        ),
        Phase("kernels", {"kernels": [*module, "bench.kernels"]}, 50),
        Phase("sanitizer", {"sanitizer": [*module, "bench.sanitized"]}, 80, "GPIPE_FAST_SANITIZER_SECONDS"),
    ]


def prepare_extension(seconds: float) -> bool:
    """Returns whether an extension exists, building it if the present one does not work; records the machine.

    If the build fails, nothing can run. A new build is tested; if the test fails, the reason is recorded and
    the phases still run.
    """
    begin, reason = time.monotonic(), extension_problem()
    commands = {"machine": [sys.executable, "-m", "bench.gpu_machine"]}
    if reason:
        print(f"build: {reason}", flush=True)
        setup = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        commands["build"] = [*setup, "--build-temp", "build/gpu"]
    environment = {"MAX_JOBS": str(os.cpu_count() or 1)}
    codes = run_commands(Phase("machine", commands, seconds, environment=environment), seconds)
    built = codes.get("build", 0) == 0
    if reason and built:
        took = f"rebuilt in {time.monotonic() - begin:.0f} s, because: {reason}"
        reason = extension_problem()
    else:
        took = "existing build used" if built else f"BUILD FAILED ({codes['build']})"
    result = f"check failed: {reason}" if reason else "imports and runs on the device"
    summary = f"extension: {took}; {result}"
    print(summary, flush=True)
    with (RESULTS / "gpu-machine.txt").open("a") as file:
        file.write(f"{summary}\n")
    return built


def extension_problem() -> str:
    """Returns why the extension does not work here, or an empty string."""
    command = [sys.executable, "-c", EXTENSION_CHECK]
    try:
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        return f"the first step took longer than {CHECK_SECONDS:g} s"
    return "" if process.returncode == 0 else (process.stderr.strip().splitlines() or ["?"])[-1]


def run(phase: Phase, seconds: float) -> bool:
    """Runs a phase and returns whether all its commands succeeded in time."""
    return not any(run_commands(phase, seconds).values())


def run_commands(phase: Phase, seconds: float) -> dict[str, int | str]:
    """Runs a phase and returns each command's exit code or failure; output is also written to files."""
    print(f"{phase.name}: {seconds:.0f} s", flush=True)
    deadline = time.monotonic() + seconds
    RESULTS.mkdir(exist_ok=True)
    variables = {phase.seconds_variable: f"{max(1.0, seconds - 2):.0f}", "PYTHONUNBUFFERED": "1"}
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
            # Kills grandchildren, too: they may hold the pipe open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            copying.join()


def _copy(source: BinaryIO, file: BinaryIO) -> None:
    for line in source:
        file.write(line)
        file.flush()
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


def run_all(wanted: Sequence[Phase], seconds: float) -> bool:
    """Runs the phases and returns whether all succeeded; each phase preserves the shares of later ones."""
    deadline, good = time.monotonic() + seconds, True
    for index, phase in enumerate(wanted):
        later = sum(each.share for each in wanted[index + 1 :])
        left = deadline - time.monotonic()
        # If the build took too long, all phases get proportionally less.
        share = max(left - later, left * phase.share / (phase.share + later)) - KILL_DELAY
        good = run(phase, max(1.0, share)) and good
    return good


def main(names: Sequence[str] = ()) -> None:
    begin, every = time.monotonic(), phases()
    unknown = set(names) - {phase.name for phase in every}
    if unknown:
        sys.exit(f"unknown phase: {', '.join(unknown)}; choose from {', '.join(p.name for p in every)}")
    if not prepare_extension(SECONDS / 2):
        sys.exit("build: the build failed and no extension exists, so nothing can run")
    wanted = [phase for phase in every if not names or phase.name in names]
    good = run_all(wanted, SECONDS - (time.monotonic() - begin))
    verdict = "all succeeded" if good else "some failed, see above"
    print(f"finished in {time.monotonic() - begin:.0f} s: {verdict}", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
