"""Overhead of the engine alone: steps of empty programs, and bare thread hand-offs for comparison.

All times are in µs. The schedule is fill-drain and the programs are empty. A step is two runs, forward and
backward, with actions F, B, SEND and RECV. Steps run back to back; for 'workers asleep' the caller works for
300 µs before every run. A bare hand-off wakes another thread through a mutex and a condition variable: fast
while both threads share a core, slow if a sleeping core must wake up.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

from bench.comparison import Outcome, Series
from bench.measure import ROOT, Timing, report, timing

SOURCES = ["bench/micro/engine.cpp", *(f"csrc/engine/{name}.cpp" for name in ("engine", "actions", "cores"))]
ROUNDS, STEPS = 200, 20
STEP, HAND_OFF = "step", "bare hand-off"
WHAT = (STEP, "recorded step", "step, workers asleep", HAND_OFF)
SIZES = [(stages, microbatches) for stages in (2, 4) for microbatches in (8, 64)]

# Microseconds by what took them, for each number of stages and of micro-batches.
Samples = dict[tuple[int, int], dict[str, list[float]]]


def build(folder: Path) -> Path:
    """Compiles the C++ half with the extension's optimization level."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    binary = folder / "engine"
    command = [compiler, "-std=c++17", "-O3", "-Icsrc", "-pthread", *SOURCES, "-o", str(binary)]
    subprocess.run(command, cwd=ROOT, check=True)
    return binary


def run(rounds: int = ROUNDS, steps: int = STEPS) -> Samples:
    """Compiles and runs the C++ program, which checks the order of actions."""
    found: Samples = defaultdict(lambda: {what: [] for what in WHAT})
    with tempfile.TemporaryDirectory() as folder:
        command = [str(build(Path(folder))), str(rounds), str(steps)]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    for line in lines:
        num_stages, num_microbatches, *times = line.split()
        for what, time in zip(WHAT, times, strict=True):
            found[int(num_stages), int(num_microbatches)][what].append(float(time))
    return found


def rows(samples: Samples) -> list[list[object]]:
    """Returns one row per size; a row starts with the numbers of stages, of micro-batches and of actions."""
    found: list[list[object]] = []
    for (num_stages, num_microbatches), sample in samples.items():
        # Each hand-off is a SEND and a RECV.
        hand_offs = 2 * (num_stages - 1) * num_microbatches
        actions = 2 * num_stages * num_microbatches + 2 * hand_offs
        times = {what: timing(each) for what, each in sample.items()}
        per_action = [_divided(times[what], actions) for what in WHAT[:2]]
        bare = f"{hand_offs} x = {times[HAND_OFF].median * hand_offs:.0f}"
        found.append([num_stages, num_microbatches, actions, *per_action, *map(str, times.values()), bare])
    return found


def _divided(time: Timing, count: int) -> str:
    median, p20, p80 = (f"{each / count:.3f}" for each in (time.median, time.p20, time.p80))
    return f"{median} [{p20}, {p80}]"


def _outcomes() -> dict[str, Outcome]:
    return {f"{k} stages, {m} micro-batches": Outcome(times=each[STEP]) for (k, m), each in run().items()}


COMPARISONS = [
    Series(
        "step of the engine", [f"{k} stages, {m} micro-batches" for k, m in SIZES], _outcomes, sampled=True
    )
]


def main() -> None:
    report(
        globals(),
        "stages | micro-batches | actions | per action: median [p20, p80] | per action, recorded | step | "
        "recorded step | step, workers asleep | bare hand-off | bare hand-offs of a step",
        rows(run()),
    )
