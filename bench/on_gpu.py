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
GRACE = 8.0
# Time limit in seconds for the import and one step.
PATIENCE = 60.0

# Tests whether an existing extension works with this Python and torch; otherwise it is rebuilt.
SUITS = """
import torch, gpipe_fast
assert gpipe_fast.built_with_cuda(), "built without CUDA"
pipe = gpipe_fast.GPipe(torch.nn.Sequential(torch.nn.Linear(4, 4)), [1], devices=["cuda:0"])
assert pipe(torch.ones(2, 4, device="cuda:0")).shape == (2, 4)
"""


@dataclass(frozen=True)
class Part:
    """A phase: commands that run concurrently.

    Attributes:
        name: name of the phase.
        commands: command lines by name; the name also names the output file.
        share: minimum time in seconds; time that earlier phases left unused is added.
        told: environment variable that passes the time limit to the commands.
        environment: further environment variables.
    """

    name: str
    commands: Mapping[str, Sequence[str]]
    share: float
    told: str = "GPIPE_FAST_SECONDS"
    environment: Mapping[str, str] = field(default_factory=dict)


def pytest(*arguments: str) -> list[str]:
    """Returns a pytest command that prints each test's name before it runs, and tracebacks of hangs."""
    options = ["-v", "-ra", "--tb=short", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    options.append("--continue-on-collection-errors")  # one broken file must not stop the others
    return [sys.executable, "-m", "pytest", *options, "-m", "cuda or smoke", *arguments]


def marked() -> list[str]:
    """Returns the test files with `cuda` tests; collecting all other files would take too long."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in found if "pytest.mark.cuda" in path.read_text()]


def parts() -> list[Part]:
    """Returns the phases in order, with their time shares."""
    pipelines = [
        "tests/unit/test_smoke.py",
        "tests/equivalence/test_cuda_steps.py",
        "tests/equivalence/test_cuda.py",
    ]
    others = [path for path in marked() if path not in pipelines]
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    module = [sys.executable, "-m"]
    return [
        Part("models", {"models": [*module, "bench.gpu_checks", "models"]}, 50),
        Part("plans", {"plans": [*module, "bench.gpu_checks", "plans"]}, 60),
        Part("steps", {"cuda": [*module, "bench.cuda"]}, 205, "GPIPE_FAST_BENCH_SECONDS"),
        # Pipeline tests have their own process: after a CUDA error, the GPU is unusable for the whole
        # process.
        Part(
            "tests",
            {"pipelines": pytest(*pipelines), "others": pytest(*others)},
            70,
            environment=deterministic,
        ),
        Part("kernels", {"kernels": [*module, "bench.kernels"]}, 50),
        Part("sanitizer", {"sanitizer": [*module, "bench.sanitized"]}, 80, "GPIPE_FAST_SANITIZER_SECONDS"),
    ]


def ready(seconds: float) -> bool:
    """Returns whether an extension exists, building it if the present one does not work; records the machine.

    If the build fails, nothing can run. A new build is tested; if the test fails, the reason is recorded and
    the phases still run.
    """
    begin, reason = time.monotonic(), unsuited()
    commands = {"machine": [sys.executable, "-m", "bench.gpu_machine"]}
    if reason:
        print(f"build: {reason}", flush=True)
        setup = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        commands["build"] = [*setup, "--build-temp", "build/gpu"]
    environment = {"MAX_JOBS": str(os.cpu_count() or 1)}
    codes = ended(Part("machine", commands, seconds, environment=environment), seconds)
    built = codes.get("build", 0) == 0
    if reason and built:
        took = f"rebuilt in {time.monotonic() - begin:.0f} s, because: {reason}"
        reason = unsuited()
    else:
        took = "existing build used" if built else f"BUILD FAILED ({codes['build']})"
    said = f"extension: {took}; {f'check failed: {reason}' if reason else 'imports and runs on the device'}"
    print(said, flush=True)
    with (RESULTS / "gpu-machine.txt").open("a") as file:
        file.write(f"{said}\n")
    return built


def unsuited() -> str:
    """Returns why the extension does not work here, or an empty string."""
    command = [sys.executable, "-c", SUITS]
    try:
        tried = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"the first step took longer than {PATIENCE:g} s"
    return "" if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["?"])[-1]


def run(part: Part, seconds: float) -> bool:
    """Runs a phase and returns whether all its commands succeeded in time."""
    return not any(ended(part, seconds).values())


def ended(part: Part, seconds: float) -> dict[str, int | str]:
    """Runs a phase and returns each command's exit code or failure; output is also written to files."""
    print(f"{part.name}: {seconds:.0f} s", flush=True)
    deadline = time.monotonic() + seconds
    RESULTS.mkdir(exist_ok=True)
    told = {part.told: f"{max(1.0, seconds - 2):.0f}", "PYTHONUNBUFFERED": "1"}
    environment = {**os.environ, **part.environment, **told}
    with contextlib.ExitStack() as stack:
        started = {
            name: stack.enter_context(_started(command, RESULTS / f"gpu-{name}.txt", environment))
            for name, command in part.commands.items()
        }
        codes = {name: _ended(process, deadline) for name, process in started.items()}
    for name, code in codes.items():
        print(f"{part.name}, {name}: {'succeeded' if code == 0 else f'failed ({code})'}", flush=True)
    return codes


@contextlib.contextmanager
def _started(
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


def _ended(process: subprocess.Popen[bytes], deadline: float) -> int | str:
    """Returns the exit code. Interrupts a late process, so that it can report its findings, then kills it."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(GRACE)
        return "interrupted at the time limit"
    except subprocess.TimeoutExpired:
        return "killed at the time limit after ignoring the interrupt"


def run_all(wanted: Sequence[Part], seconds: float) -> bool:
    """Runs the phases and returns whether all succeeded; each phase preserves the shares of later ones."""
    deadline, good = time.monotonic() + seconds, True
    for index, part in enumerate(wanted):
        later = sum(each.share for each in wanted[index + 1 :])
        left = deadline - time.monotonic()
        # If the build took too long, all phases get proportionally less.
        share = max(left - later, left * part.share / (part.share + later)) - GRACE
        good = run(part, max(1.0, share)) and good
    return good


def main(names: Sequence[str] = ()) -> None:
    begin, every = time.monotonic(), parts()
    unknown = set(names) - {part.name for part in every}
    if unknown:
        sys.exit(f"unknown phase: {', '.join(unknown)}; choose from {', '.join(part.name for part in every)}")
    if not ready(SECONDS / 2):
        sys.exit("build: the build failed and no extension exists, so nothing can run")
    wanted = [part for part in every if not names or part.name in names]
    good = run_all(wanted, SECONDS - (time.monotonic() - begin))
    verdict = "all succeeded" if good else "some failed, see above"
    print(f"finished in {time.monotonic() - begin:.0f} s: {verdict}", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
