"""The time of first calls: of three models, of further sequence lengths, and of starting a process.

`python -m bench first-call --before TREE` also runs an earlier version, by turns, from a built tree.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.measure import ROOT, Table, report

MODELS = {
    "densenet": "DenseNet-121, 8 images of 64 pixels",
    "gpt2": "GPT-2 small, 4 x 64 tokens",
    "lengths": "GPT of 12 blocks of width 64",
}
# What a process has done before it imports gpipe_fast, and the options for it.
IMPORTS = {"torch": (), "torch and an optimizer's first step": ("--after-optimizer",)}
PROCESSES = 3
Run = Mapping[str, Any]


def run(tree: Path, model: str, *options: str) -> Run:
    """Runs one model's first calls, or "import", in a new process, with the gpipe_fast of a tree."""
    # Run as text, because the file's folder has modules with the names of libraries.
    script = (ROOT / "bench" / "micro" / "first_call_process.py").read_text()
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, model, *options],
        env=environment,
        cwd=tree,
        stdout=subprocess.PIPE,
        check=True,
    )
    found: Run = json.loads(done.stdout.splitlines()[-1])
    return found


def _median(runs: Sequence[Run], step: int, key: str) -> float:
    return float(median(run["steps"][step][key] for run in runs))


def rows_of(model: str, version: str, runs: Sequence[Run]) -> list[list[object]]:
    """Returns the rows of one model in one version."""
    num_steps = len(runs[0]["steps"])

    def row(what: str, steps: Sequence[int]) -> list[object]:
        values = [median(_median(runs, i, key) for i in steps) for key in ("forward", "step", "processor")]
        return [MODELS[model], what, version, *(f"{value:.2f}" for value in values)]

    if model != "lengths":
        return [row("first call", [0]), row("third call", [num_steps - 1])]
    names = ["first length", "second length", "third length"]
    return [*(row(name, [i]) for i, name in enumerate(names)), row("further lengths", range(3, num_steps))]


def parts_of(model: str) -> list[list[object]]:
    """Returns rows with the processor time of the parts of a model's first calls, in a process of its own."""
    command = [sys.executable, "-m", "bench.micro.first_call_parts", model]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GPIPE_FAST_PROGRESS": "0"}
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    steps: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    calls = {"first call": 0}
    if model == "lengths":
        calls = {"first length": 0, "third length": 2, "further length": len(steps) - 1}
    return [
        [MODELS[model], call, part, f"{seconds:.3f}"]
        for call, index in calls.items()
        for part, seconds in sorted(steps[index].items(), key=lambda item: -item[1])
        if seconds >= 0.0005
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.micro.first_call", description=__doc__)
    parser.add_argument("--before", type=Path, help="a tree in which an earlier version was built")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="processes of each kind")
    arguments = parser.parse_args(sys.argv[1:] if __name__ == "__main__" else [])
    trees = {"now": ROOT} if arguments.before is None else {"before": arguments.before, "now": ROOT}
    runs: dict[tuple[str, str], list[Run]] = {(m, v): [] for m in MODELS for v in trees}
    imports: dict[tuple[str, str], list[float]] = {(after, v): [] for after in IMPORTS for v in trees}
    for _ in range(arguments.processes):
        for model, version in runs:
            runs[model, version].append(run(trees[version].resolve(), model))
        for after, version in imports:
            found = run(trees[version].resolve(), "import", *IMPORTS[after])
            imports[after, version].append(found["import"])
    rows = [row for (model, version), done in runs.items() for row in rows_of(model, version, done)]
    for (after, version), seconds in imports.items():
        rows.append(["", f"import gpipe_fast, after {after}", version, "", f"{median(seconds):.2f}", ""])
    report(
        "first_call",
        "First calls",
        ["model", "call", "version", "forward, s", "forward and backward, s", "processor, s"],
        rows,
        f"Two stages on the CPU, one thread each; the medians of {arguments.processes} processes, which run "
        "by turns. A call includes the step itself. Processor time is that of all threads.\n",
        [
            Table(
                "What is left",
                ["model", "call", "part", "processor, s"],
                [row for model in MODELS for row in parts_of(model)],
                "Parts of the first calls now, each without the parts inside of it.",
            )
        ],
    )


if __name__ == "__main__":
    main()
