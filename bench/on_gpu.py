"""What `make gpu` runs within its time, in the order of worth; each phase writes its files as it goes.

    phase        what                                                      in bench/results
    machine      what there is, while the extension is built; that it      gpu-machine.txt
                 imports and sees the device
    models       some steps of each model against the plain loop: what     gpu-models.md
                 is replayed, and what prevents it
    plans        plans in flight together, memory, autocast, transports    gpu-plans.md
    steps        against checkpointed loops, torchgpipe, torch.compile     the GPU's name and date, .md, .json
    tests        those marked `cuda`                                       gpu-pipelines.txt, gpu-others.txt
    kernels      against eager PyTorch, Inductor and Liger-Kernel          kernels.md
    sanitizer    steps under compute-sanitizer                             sanitizer.txt

`python -m bench.on_gpu [phase ...]` runs some of them alone. Whatever fails, the phases after it run; each
has a share of the time, and what it leaves is the next one's. What COMMAND prints is in `gpu-COMMAND.txt`.
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
# After which what does not end when it is interrupted is killed.
GRACE = 8.0
# Seconds for the import and one step.
PATIENCE = 60.0

# Whether the extension that is there suits this Python and torch; else it is built.
SUITS = """
import torch, gpipe_fast
assert gpipe_fast.built_with_cuda(), "built without CUDA"
pipe = gpipe_fast.GPipe(torch.nn.Sequential(torch.nn.Linear(4, 4)), [1], devices=["cuda:0"])
assert pipe(torch.ones(2, 4, device="cuda:0")).shape == (2, 4)
"""


@dataclass(frozen=True)
class Part:
    """A phase: commands that run at once.

    Attributes:
        name: of the part, and of the files of its output.
        commands: by name.
        share: seconds, to which comes what the parts before have left.
        told: the environment variable that tells them how long they have.
    """

    name: str
    commands: Mapping[str, Sequence[str]]
    share: float
    told: str = "GPIPE_FAST_SECONDS"
    environment: Mapping[str, str] = field(default_factory=dict)


def pytest(*arguments: str) -> list[str]:
    """Who runs, before it is known how it ends; and a traceback of what hangs."""
    options = ["-v", "-ra", "--tb=short", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    options.append("--continue-on-collection-errors")  # a file that does not import loses no other's tests
    return [sys.executable, "-m", "pytest", *options, "-m", "cuda or smoke", *arguments]


def marked() -> list[str]:
    """Files with tests that need a GPU; to collect all the others would take much of their time."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in found if "pytest.mark.cuda" in path.read_text()]


def parts() -> list[Part]:
    """In this order, and so many seconds for each."""
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
        # Those of pipelines by themselves: a GPU that has met an error is of no use to a process any more.
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
    """Whether there is an extension: the one that is there, or after a build; what there is, is noted.

    A build that fails leaves nothing to run. One that succeeds is tried out, and whatever is amiss with it is
    noted: the phases show the rest.
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
        took = f"was built in {time.monotonic() - begin:.0f} s, since: {reason}"
        reason = unsuited()
    else:
        took = "is taken as it is" if built else f"COULD NOT BE BUILT ({codes['build']})"
    said = f"extension: {took}; {f'it fails: {reason}' if reason else 'it imports, and runs on the device'}"
    print(said, flush=True)
    with (RESULTS / "gpu-machine.txt").open("a") as file:
        file.write(f"{said}\n")
    return built


def unsuited() -> str:
    """Why the extension does not suit, or nothing."""
    command = [sys.executable, "-c", SUITS]
    try:
        tried = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"a first step is not done within {PATIENCE:g} s"
    return "" if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["?"])[-1]


def run(part: Part, seconds: float) -> bool:
    """Whether all of a part's commands ended well in time."""
    return not any(ended(part, seconds).values())


def ended(part: Part, seconds: float) -> dict[str, int | str]:
    """How each of a part's commands ended; their output goes to files too."""
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
        print(f"{part.name}, {name}: {'ended well' if code == 0 else f'ended with {code}'}", flush=True)
    return codes


@contextlib.contextmanager
def _started(
    command: Sequence[str], path: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process, in a group of its own, whose output is shown and kept."""
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
            # Also what it has left behind, which may hold the pipe.
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
    """The exit code; what is late is interrupted, so that it says what it knows, then killed."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(GRACE)
        return "a signal: its time was over"
    except subprocess.TimeoutExpired:
        return "a kill: its time was over, and it did not listen"


def run_all(wanted: Sequence[Part], seconds: float) -> bool:
    """Whether all went well; every part leaves the shares of those after it untouched."""
    deadline, good = time.monotonic() + seconds, True
    for index, part in enumerate(wanted):
        later = sum(each.share for each in wanted[index + 1 :])
        left = deadline - time.monotonic()
        # Where the build took more than it should, all have less.
        share = max(left - later, left * part.share / (part.share + later)) - GRACE
        good = run(part, max(1.0, share)) and good
    return good


def main(names: Sequence[str] = ()) -> None:
    begin, every = time.monotonic(), parts()
    unknown = set(names) - {part.name for part in every}
    if unknown:
        sys.exit(
            f"no phase is called {', '.join(unknown)}; there are {', '.join(part.name for part in every)}"
        )
    if not ready(SECONDS / 2):
        sys.exit("build: there is no extension, so there is nothing to run")
    wanted = [part for part in every if not names or part.name in names]
    good = run_all(wanted, SECONDS - (time.monotonic() - begin))
    verdict = "well" if good else "something failed, see above"
    print(f"all in {time.monotonic() - begin:.0f} s: {verdict}", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
