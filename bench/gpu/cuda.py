"""Steps of four stages on one GPU, compared with plain PyTorch and torchgpipe.

`python -m bench cuda [row ...]` measures each row in a process of its own, in which the candidates alternate.
Results are written after each row, so an interrupted run keeps the rows that it finished. With `--device cpu`
it measures small models, whose figures are meaningless.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch

from bench import measure
from bench.comparison import Outcome, compare
from bench.gpu import children, copies
from bench.gpu.subjects import LOOP, MAX_ERROR_RATIO, OURS, PIPELINES, ROWS, STAGES, Row, errors_of, steps_of

SECONDS = float(os.environ.get("GPIPE_FAST_SECONDS", "480"))
# Seconds of the rounds of one row, and its time limit in all; an H200 took 56 for a GPT with all kernels in
# caches, and over 120 without.
ROUND_SECONDS, ROW_SECONDS = 15.0, 180.0
# Copies come early: they are quick and may matter most.
ORDER = ("tiny-never", "tiny-always", copies.NAME, *list(ROWS)[2:])
HEADERS = ["candidate", "ms: median [p20, p80]", "per second", "speedup of gpipe_fast", "peak, MiB", "error"]
NOTE = (
    "All stages share one device. A step is forward and backward from a given output gradient, until the "
    "device has finished. Plain loops recompute each stage as a whole with non-reentrant "
    "torch.utils.checkpoint. Speedups are paired by round: the median with its 95% confidence interval. "
    "Memory is what is in use at most, with what captured graphs keep, and without parameters and input. The "
    "error is the largest gradient error against float64, relative "
    "to the largest element of its tensor, on a small model of the same kind. If ours exceeds "
    f"{MAX_ERROR_RATIO:g} times the plain loop's error, it is WRONG and is not timed.\n"
)


def measured(row: Row, device: str) -> tuple[dict[str, str], dict[str, Outcome]]:
    """Measures the candidates of a row; returns each one's error or failure, and those that have times."""
    on_gpu = torch.device(device).type == "cuda"
    subject, backend = (row.full, "inductor") if on_gpu else (row.small, "eager")
    errors = errors_of(row.small, subject.candidates(), device, backend)
    texts = {name: error if isinstance(error, str) else f"{error:.1e}" for name, error in errors.items()}
    limit = MAX_ERROR_RATIO * loop if isinstance(loop := errors[LOOP], float) else 0.0
    for name in PIPELINES:
        if isinstance(error := errors.get(name), float) and not error <= limit:
            texts[name] = f"WRONG: {texts[name]}"
    right = [name for name, text in texts.items() if "WRONG" not in text and "FAILED" not in text]
    steps = steps_of(subject, right, device, backend)
    texts |= {name: step for name, step in steps.items() if isinstance(step, str)}
    timed = {name: step for name, step in steps.items() if not isinstance(step, str)}
    return texts, compare(timed, None, row.rounds, pause=measure.PAUSE, seconds=ROUND_SECONDS)


def outcomes(row: Row) -> dict[str, Outcome]:
    """Returns what was measured of each candidate on a GPU."""
    return measured(row, "cuda:0")[1]


def rows_of(row: Row, device: str) -> list[list[object]]:
    """Returns a row of the table for each candidate; one that raises, or is wrong, has no times."""
    texts, found = measured(row, device)
    subject, table = row.full if device.startswith("cuda") else row.small, list[list[object]]()
    for name, text in texts.items():
        each = found.get(name, Outcome())
        speed = f"{subject.batch * subject.unit[1] / each.median * 1e6:,.0f}" if each.median else "-"
        ours = found.get(OURS, Outcome()).times
        faster = str(measure.Ratio.of(each.times, ours)) if each.times and ours else "-"
        table.append([name, each.ms(), speed, faster, each.peak(), text])
    return table


def table_of(name: str, found: Any) -> measure.Table:
    """Returns the table of one row, or why it has none."""
    is_copies = name == copies.NAME
    title, headers, note = copies.TITLE, copies.HEADERS, ""
    if not is_copies:
        subject = ROWS[name].full
        title, headers = ROWS[name].title, HEADERS
        note = (
            f"Batch {subject.batch}, {subject.chunks} micro-batches, {STAGES} stages, checkpoint "
            f"'{subject.checkpoint}'; 'per second' counts {subject.unit[0]}.\n"
        )
    return measure.Table(title, headers, [[found]] if isinstance(found, str) else found, note)


def versions() -> str:
    """Returns the versions of CUDA and cuDNN, and the memory of the GPU."""
    found = [f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"]
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found.append(f"{gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}")
    return ", ".join(found)


def run(names: Sequence[str], device: str, seconds: float) -> bool:
    """Measures rows, most important first, and returns whether every candidate was measured."""
    gpu = torch.cuda.get_device_name() if torch.device(device).type == "cuda" else "CPU"
    day = datetime.datetime.now(datetime.timezone.utc).date()
    name = f"{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}-{day}"
    found: dict[str, Any] = {}

    def keep(row: str, result: Any, taken: float) -> None:
        found[row] = result
        first, *tables = [table_of(each, result) for each, result in found.items()]
        note = f"{versions()}. {NOTE}\n## {first.heading}\n\n{first.note}"
        measure.write(name, f"Pipelines on {gpu}", first.headers, first.rows, note, tables)
        print(f"{row}, {taken:.0f} s: {result}", flush=True)

    options = ("--device", device)
    not_run = children.run("bench.gpu.cuda", names, seconds, keep, options, ROW_SECONDS)
    for row in not_run:
        keep(row, "skipped: no time left", 0.0)
    good = [
        row for row in found if not any(word in str(found[row]) for word in ("FAILED", "WRONG", "skipped"))
    ]
    print(f"{len(good)} of {len(names)} rows are complete", flush=True)
    return len(good) == len(names)


def main(arguments: Sequence[str] = ()) -> bool:
    """Measures and returns whether every candidate of every row was measured."""
    parser = argparse.ArgumentParser(prog="python -m bench cuda", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"rows to measure, from {', '.join(ORDER)} (default: all)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of the run")
    parser.add_argument("--device", default="cuda:0", help="device of all stages")
    parser.add_argument("--here", action="store_true", help="measure in this process, for a parent")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.name if name not in ORDER]:
        parser.error(f"unknown row: {', '.join(unknown)}; choose from {', '.join(ORDER)}")
    device: str = options.device
    if options.here:
        children.serve(
            options.name, lambda n: copies.rows(device) if n == copies.NAME else rows_of(ROWS[n], device)
        )
        return True
    if device.startswith("cuda") and not torch.cuda.is_available():
        print("cuda: skipped, needs a GPU and none is visible", flush=True)
        return False
    return run(options.name or ORDER, device, options.seconds)


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:]) else 1)
