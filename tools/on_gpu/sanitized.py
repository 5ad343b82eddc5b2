"""Runs a few steps under compute-sanitizer and writes its reports to bench/results.

`python -m tools.on_gpu.sanitized` starts the tools, inside of which it runs with `steps WORD`: WORD selects
`captured` steps, `uncaptured` steps, or one step of the `smallest` model.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import measure

SECONDS = float(os.environ.get("GPIPE_FAST_SECONDS", "80"))
# A run is skipped if fewer seconds are left.
MIN_SECONDS = 10
SMALLEST, UNCAPTURED, CAPTURED = "smallest", "uncaptured", "captured"

# Tools and the steps that they check, the most informative first. The first run may use all the time, so that
# at least one run completes.
RUNS = (
    ("memcheck", SMALLEST),
    ("memcheck", CAPTURED),
    ("synccheck", SMALLEST),
    ("memcheck", UNCAPTURED),
    ("racecheck", SMALLEST),
)


def find_sanitizer() -> str | None:
    """Returns the path of compute-sanitizer, or None; toolkits install it next to nvcc."""
    folders = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ["PATH"], *(str(Path(folder) / "bin") for folder in folders)])
    return shutil.which("compute-sanitizer", path=path)


def run_sanitizer(sanitizer: str, seconds: float) -> bool:
    """Runs the tools while time remains, and returns whether none reported an error."""
    deadline, good = time.monotonic() + seconds, True
    measure.RESULTS.mkdir(exist_ok=True)
    with (measure.RESULTS / "sanitizer.txt").open("w") as file:
        for name, what in RUNS:
            left, code = deadline - time.monotonic(), "skipped, no time left"
            print(f"== {name}, {what}", file=file, flush=True)
            command = [sanitizer, "--tool", name, "--error-exitcode", "9", "--print-limit", "20"]
            command += [sys.executable, "-m", "tools.on_gpu.sanitized", "steps", what]
            # Reads of freed memory go unnoticed while the allocator caches it; captured steps need the cache.
            cached = {} if what == CAPTURED else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            if left > MIN_SECONDS:
                try:
                    done = subprocess.run(
                        command,
                        env=os.environ | cached,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        cwd=measure.ROOT,
                        timeout=left,
                    )
                    code = str(done.returncode)
                except subprocess.TimeoutExpired:
                    code = f"none, killed after {left:.0f} s"
                good = good and code == "0"
            for to in (file, sys.stdout):
                print(f"== {name}, {what}: exit code {code}", file=to, flush=True)
    return good


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
    print(f"{what}: gradients are right", flush=True)


def main(arguments: Sequence[str] = ()) -> None:
    if arguments[:1] == ["steps"]:
        steps(*arguments[1:])
    elif (sanitizer := find_sanitizer()) is None:
        print("sanitizer: skipped, compute-sanitizer is not installed", flush=True)
    else:
        sys.exit(0 if run_sanitizer(sanitizer, SECONDS) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
