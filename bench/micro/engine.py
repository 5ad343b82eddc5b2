"""Overhead of the engine alone: steps of empty programs, and bare thread hand-offs for comparison.

All times are in µs. The schedule is fill-drain and the programs are empty. A step is two runs, forward and
backward, with actions F, B, SEND and RECV. Steps run back to back; for 'workers asleep' the caller works for
300 µs before every run. A bare hand-off wakes another thread through a mutex and a condition variable: fast
while both threads share a core, slow if a sleeping core must wake up.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.measure import report

ROOT = Path(__file__).parents[2]
SOURCES = [
    "bench/micro/engine.cpp",
    "csrc/engine/engine.cpp",
    "csrc/engine/actions.cpp",
    "csrc/engine/cores.cpp",
]
ROUNDS, STEPS = 200, 20


@dataclass
class Samples:
    """Times in µs: steps, recorded steps, steps that must wake the workers, and single hand-offs."""

    steps: list[float] = field(default_factory=list)
    recorded_steps: list[float] = field(default_factory=list)
    waking_steps: list[float] = field(default_factory=list)
    hand_offs: list[float] = field(default_factory=list)


Size = tuple[int, int]  # stages, micro-batches


def build(folder: Path) -> Path:
    """Compiles the C++ half with the extension's optimization level."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    binary = folder / "engine"
    command = [compiler, "-std=c++17", "-O3", "-Icsrc", "-pthread", *SOURCES, "-o", str(binary)]
    subprocess.run(command, cwd=ROOT, check=True)
    return binary


def run(binary: Path, rounds: int, steps: int) -> dict[Size, Samples]:
    """Runs the C++ program, which checks the order of actions; returns samples by size."""
    command = [str(binary), str(rounds), str(steps)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    samples: dict[Size, Samples] = defaultdict(Samples)
    for line in lines:
        num_stages, num_microbatches, *times = line.split()
        sample = samples[int(num_stages), int(num_microbatches)]
        lists = (sample.steps, sample.recorded_steps, sample.waking_steps, sample.hand_offs)
        for values, time in zip(lists, times, strict=True):
            values.append(float(time))
    return samples


def rows(samples: Mapping[Size, Samples]) -> list[list[object]]:
    """Returns one row per size; a row starts with the numbers of stages and micro-batches."""
    result: list[list[object]] = []
    for (num_stages, num_microbatches), sample in samples.items():
        num_compute_actions = 2 * num_stages * num_microbatches
        hand_offs = 2 * (num_stages - 1) * num_microbatches
        actions = num_compute_actions + 2 * hand_offs  # each hand-off is a SEND and a RECV
        bare_total = statistics.median(sample.hand_offs) * hand_offs
        result.append(
            [
                *(num_stages, num_microbatches, actions),
                _spread(sample.steps, actions, 3),
                f"{statistics.median(sample.steps) / num_compute_actions:.3f}",
                _spread(sample.recorded_steps, actions, 3),
                _spread(sample.steps, 1, 1),
                _spread(sample.waking_steps, 1, 1),
                _spread(sample.hand_offs, 1, 1),
                f"{hand_offs} x = {bare_total:.0f}",
            ]
        )
    return result


def _spread(samples: Sequence[float], count: int, digits: int) -> str:
    each = sorted(sample / count for sample in samples)
    cuts = statistics.quantiles(each, n=10) if len(each) > 1 else each * 9
    return f"{statistics.median(each):.{digits}f} [{cuts[1]:.{digits}f}, {cuts[7]:.{digits}f}]"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        samples = run(build(Path(folder)), ROUNDS, STEPS)
    report(
        globals(),
        "stages | micro-batches | actions | per action: median [p20, p80] | per F or B | "
        "per action, recorded | step | step, workers asleep | bare hand-off | bare "
        "hand-offs of a step",
        rows(samples),
    )
