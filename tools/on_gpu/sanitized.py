"""Runs a few steps under compute-sanitizer and writes its reports to bench/results.

`python -m tools.on_gpu.sanitized` starts the tools, inside of which it runs with `steps WORD`: WORD selects
`captured` steps, `uncaptured` steps, or one step of the `smallest` model.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from bench import measure

SECONDS = float(os.environ.get("GPIPE_FAST_SANITIZER_SECONDS", "80"))
# A run is skipped if fewer seconds are left.
MIN_SECONDS = 10
SMALLEST, UNCAPTURED, CAPTURED = "smallest", "uncaptured", "captured"

# Tools and the steps that they check. The first run may use all the time, so that at least one run completes.
# Then the most informative runs come first, because time may run out.
RUNS = (
    ("memcheck", SMALLEST),
    ("memcheck", CAPTURED),
    ("synccheck", SMALLEST),
    ("memcheck", UNCAPTURED),
    ("racecheck", SMALLEST),
)


def find_sanitizer() -> str | None:
    """Returns the path of compute-sanitizer, or None; toolkits install it next to nvcc."""
    for folder in (None, os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        found = shutil.which("compute-sanitizer", path=folder and str(Path(folder) / "bin"))
        if found:
            return found
    return None


def run_sanitizer(sanitizer: str, seconds: float, python: Sequence[str] = (sys.executable,)) -> bool:
    """Runs the tools while time remains, and returns whether none reported an error."""
    deadline, good = time.monotonic() + seconds, True
    for name, what in RUNS:
        left = deadline - time.monotonic()
        title = f"{name}, {what}"
        if left < MIN_SECONDS:
            print(f"{title}: skipped, {max(left, 0):.0f} s left, {MIN_SECONDS} s needed", flush=True)
            continue
        command = [sanitizer, "--tool", name, "--error-exitcode", "9", "--print-limit", "20"]
        command += [*python, "-m", "tools.on_gpu.sanitized", "steps", what]
        # Reads of freed memory go unnoticed while the allocator caches it; captured programs need the cache.
        cached = {} if what == CAPTURED else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        measure.RESULTS.mkdir(exist_ok=True)
        with (measure.RESULTS / "sanitizer.txt").open("a+") as file:
            file.write(f"== {title}\n")
            file.flush()
            begin = file.tell()
            code = _exit_code(command, os.environ | cached, left, file)
            file.seek(begin)
            lines = file.read().strip().splitlines()
            file.write(f"== {title}: exit code {code}\n")
        good = good and code == "0"
        print(f"{title}: exit code {code}; {lines[-1] if lines else ''}", flush=True)
    return good


def _exit_code(command: Sequence[str], environment: dict[str, str], seconds: float, file: IO[str]) -> str:
    """Returns a process's exit code; its output is streamed to a file, and a late process is killed."""
    process = subprocess.Popen(
        command, env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=measure.ROOT,
        start_new_session=True,
    )  # fmt: skip
    try:
        return str(process.wait(seconds))
    except subprocess.TimeoutExpired:
        return f"none, killed after {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and its child processes
        process.wait()


def steps(what: str, device: str = "cuda:0") -> None:
    """Runs several steps of a pipeline over every transport and compares them with the plain loop."""
    import torch
    from torch import nn

    from bench.peers import Step, looped, relative_difference
    from gpipe_fast import GPipe, keyed_rng

    small = what == SMALLEST
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32), nn.Dropout(0.2)]
    if not small:
        layers += [nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()]
    model = nn.Sequential(*layers).to(device)
    x, gradient = torch.randn(16, 32, device=device), torch.randn(16, 32, device=device)
    loop = Step(model.parameters(), looped(model, 4), x, gradient)
    torch.manual_seed(1)
    with keyed_rng(model):
        loop()
    wanted = loop.gradients()
    print("the plain loop is done", flush=True)
    balance = [1, 1] if small else [1, 2, 1, 2]
    for transport in ("auto",) if small else ("auto", "peer", "pinned"):
        devices, captured = [device] * len(balance), what == CAPTURED
        pipe = GPipe(model, balance, devices=devices, chunks=4, capture=captured, transport=transport)
        step = Step(pipe.parameters(), pipe, x, gradient)
        for _ in range({SMALLEST: 1, UNCAPTURED: 2, CAPTURED: 5}[what]):
            torch.manual_seed(1)
            step()
        off = relative_difference(step.gradients(), wanted)
        assert off < 1e-5, f"{transport}: gradients are off by {off}"
        print(f"{transport}: gradients are right", flush=True)
    print(f"{what}: gradients are right", flush=True)


def main(arguments: Sequence[str] = ()) -> None:
    if arguments[:1] == ["steps"]:
        steps(*arguments[1:])
        return
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("sanitizer: skipped, compute-sanitizer is not installed", flush=True)
        return
    (measure.RESULTS / "sanitizer.txt").unlink(missing_ok=True)
    sys.exit(0 if run_sanitizer(sanitizer, SECONDS) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
