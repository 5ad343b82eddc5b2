"""What `make gpu` runs within its time: the build, tests that need a GPU, benchmarks, a sanitizer.

`python -m bench.on_gpu [part ...]` runs some parts alone, of tests, steps, kernels and sanitizer.

Whatever fails, the parts after it run. Each has a share of the time, and what it leaves is the next one's.
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
RESULTS = ROOT / "bench" / "results"
SECONDS = float(os.environ.get("GPIPE_FAST_GPU_SECONDS", "585"))
# After which what does not end when it is interrupted is killed.
GRACE = 8.0

# Whether the extension that is there suits this Python and torch; else it is built.
SUITS = """
import torch, gpipe_fast
assert gpipe_fast.built_with_cuda(), "built without CUDA"
pipe = gpipe_fast.GPipe(torch.nn.Sequential(torch.nn.Linear(4, 4)), [1], devices=["cuda:0"])
assert pipe(torch.ones(2, 4, device="cuda:0")).shape == (2, 4)
"""


@dataclass(frozen=True)
class Part:
    """Commands that run at once.

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
    return [sys.executable, "-m", "pytest", *options, "-m", "cuda or smoke", *arguments]


def parts() -> list[Part]:
    """In this order, and so many seconds for each."""
    pipelines = [
        "tests/unit/test_smoke.py",
        "tests/equivalence/test_cuda.py",
        "tests/equivalence/test_cuda_steps.py",
    ]
    others = [f"--ignore={path}" for path in pipelines]
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    module = [sys.executable, "-m"]
    return [
        # Those of pipelines by themselves: a GPU that has met an error is of no use to a process any more.
        Part(
            "tests",
            {"pipelines": pytest(*pipelines), "others": pytest("tests", *others)},
            130,
            environment=deterministic,
        ),
        Part("steps", {"cuda": [*module, "bench.cuda"]}, 270, "GPIPE_FAST_BENCH_SECONDS"),
        Part("kernels", {"kernels": [*module, "bench.kernels"]}, 60),
        Part("sanitizer", {"sanitizer": [*module, "bench.sanitized"]}, 50, "GPIPE_FAST_SANITIZER_SECONDS"),
    ]


def build(seconds: float) -> bool:
    """Whether there is an extension that suits: as it is, or after a build."""
    there = subprocess.run([sys.executable, "-c", SUITS], cwd=ROOT, capture_output=True, text=True)
    if there.returncode == 0:
        print("build: the extension that is there suits, and is taken as it is", flush=True)
        return True
    reason = (there.stderr.strip().splitlines() or ["?"])[-1]
    print(f"build: {reason}", flush=True)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--build-temp", "build/gpu"]
    environment = {"MAX_JOBS": str(os.cpu_count() or 1)}
    return run(Part("build", {"build": command}, seconds, environment=environment), seconds)


def run(part: Part, seconds: float) -> bool:
    """Whether all of a part's commands ended well in time; their output goes to files too."""
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
    return not any(codes.values())


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
            f"no part is called {', '.join(unknown)}; there are {', '.join(part.name for part in every)}"
        )
    if not build(SECONDS / 2):
        sys.exit("build: there is no extension, so there is nothing to run")
    wanted = [part for part in every if not names or part.name in names]
    good = run_all(wanted, SECONDS - (time.monotonic() - begin))
    verdict = "well" if good else "something failed, see above"
    print(f"all in {time.monotonic() - begin:.0f} s: {verdict}", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
