"""Steps of four stages on one GPU, beside plain PyTorch, torchgpipe, and the bare time of their products.

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
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bench import case_processes, measure
from bench.comparison import Outcome, compare
from bench.gpu.bare import bare_calls, bare_rows, programs_of
from bench.gpu.subjects import (
    LOOP,
    MAX_ERROR_RATIO,
    OURS,
    PIPELINES,
    ROWS,
    STAGES,
    UNCAPTURED,
    Row,
    Synchronized,
    errors_of,
    steps_of,
)
from gpipe_fast import GPipe
from gpipe_fast.container import runner_of

SECONDS = float(os.environ.get("GPIPE_FAST_SECONDS", "480"))
# Seconds of the rounds of one row, and its time limit in all; an H200 took 56 for a GPT with all kernels in
# caches, and over 120 without.
ROUND_SECONDS, ROW_SECONDS = 15.0, 240.0
# Words in a result that is not complete.
_INCOMPLETE = ("FAILED", "WRONG", "skipped")
HEADERS = [
    "candidate", "ms: median [p20, p80]", "per second", "speedup of gpipe_fast", "step / bare sum",
    "peak, MiB", "error",
]  # fmt: skip
BARE_HEADERS = ["operator", "operands", "in a step", "µs bare", "in a step, ms", "TFLOP/s"]
NOTE = (
    "All stages share one device. A step is forward and backward from a given output gradient, until the "
    "device has finished. Plain loops recompute each stage as a whole with non-reentrant "
    "torch.utils.checkpoint. Speedups are paired by round: the median with its 95% confidence interval, "
    "beside steps that are not captured if captured ones are not measured. The bare sum adds the "
    "time of each distinct product and call of attention alone, on random numbers, times its number. "
    "Memory is what is in use at most, with what captured graphs keep, and without parameters and input. The "
    "error is the largest gradient error against float64, relative "
    "to the largest element of its tensor, on a small model of the same kind. If ours exceeds "
    f"{MAX_ERROR_RATIO:g} times the plain loop's error, it is WRONG and is not timed.\n"
)


def measured(row: Row, device: str) -> tuple[dict[str, str], dict[str, Synchronized], dict[str, Outcome]]:
    """Measures the candidates of a row.

    Returns each one's error or failure, the steps of those that can be timed, and what was measured of these.
    """
    on_gpu = torch.device(device).type == "cuda"
    subject, backend = (row.full, "inductor") if on_gpu else (row.small, "eager")
    errors = errors_of(row.small, subject.candidates(), device, backend)
    texts = {name: error if isinstance(error, str) else f"{error:.1e}" for name, error in errors.items()}
    limit = MAX_ERROR_RATIO * loop if isinstance(loop := errors[LOOP], float) else 0.0
    for name in PIPELINES:
        if isinstance(error := errors.get(name), float) and not error <= limit:
            texts[name] = f"WRONG: {texts[name]}"
    right = [name for name, text in texts.items() if "WRONG" not in text and "FAILED" not in text]
    steps = steps_of(subject, [name for name in right if name not in row.untimed], device, backend)
    texts |= {name: step for name, step in steps.items() if isinstance(step, str)}
    timed = {name: step for name, step in steps.items() if not isinstance(step, str)}
    return texts, timed, compare(timed, None, row.rounds, pause=measure.PAUSE, seconds=ROUND_SECONDS)


def outcomes(row: Row) -> dict[str, Outcome]:
    """Returns what was measured of each candidate on a GPU."""
    return measured(row, "cuda:0")[2]


def measured_row(name: str, device: str) -> list[list[list[object]]]:
    """Returns the rows of the tables of candidates and of bare calls; what is wrong has no times."""
    row = ROWS[name]
    texts, timed, found = measured(row, device)
    subject, table = row.full if device.startswith("cuda") else row.small, list[list[object]]()
    calls, bare = list[list[object]](), 0.0
    if UNCAPTURED in timed:
        pipe = timed[UNCAPTURED].step.forward
        assert isinstance(pipe, GPipe)
        programs = programs_of(runner_of(pipe).planner, subject.checkpoint, subject.chunks)
        calls, bare = bare_rows(bare_calls(programs), lambda call: call.microseconds(device))
    for candidate, text in texts.items():
        each = found.get(candidate, Outcome())
        speed = f"{subject.batch * subject.unit[1] / each.median * 1e6:,.0f}" if each.median else "-"
        ours = found.get(OURS, found.get(UNCAPTURED, Outcome())).times
        faster = str(measure.Ratio.of(each.times, ours)) if each.times and ours else "-"
        over = f"{each.median / bare / 1e3:.2f}" if each.median and bare else "-"
        table.append([candidate, each.ms(), speed, faster, over, each.peak(), text])
    return [table, calls]


def tables_of(name: str, found: Any) -> list[measure.Table]:
    """Returns the tables of one row, or one that says why there are none."""
    row = ROWS[name]
    if isinstance(found, str):
        return [measure.Table(row.title, ["result"], [[found]])]
    note = (
        f"Batch {row.full.batch}, {row.full.chunks} micro-batches, {STAGES} stages, checkpoint "
        f"'{row.full.checkpoint}'; 'per second' counts {row.full.unit[0]}.\n"
    )
    tables = [measure.Table(row.title, HEADERS, found[0], note)]
    if found[1]:
        tables.append(measure.Table(f"{row.title}: bare products and attention", BARE_HEADERS, found[1]))
    return tables


def main(arguments: Sequence[str] = ()) -> bool:
    """Measures the named rows, by default all, and returns whether all of them are complete."""
    parser = argparse.ArgumentParser(prog="python -m bench cuda")
    parser.add_argument("name", nargs="*", help=f"rows, from {', '.join(ROWS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of the run")
    parser.add_argument("--device", default="cuda:0", help="device of all stages")
    parser.add_argument("--suffix", default="", help="end of the name of the written file")
    parser.add_argument("--here", action="store_true", help="measure in this process, for a parent")
    options = parser.parse_args(arguments)
    if unknown := [row for row in options.name if row not in ROWS]:
        parser.error(f"unknown row: {', '.join(unknown)}; choose from {', '.join(ROWS)}")
    if options.here:
        case_processes.serve(options.name, lambda row: measured_row(row, options.device))
        return True
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("cuda: skipped, needs a GPU and none is visible", flush=True)
        return False
    return _run(options.name or list(ROWS), options.device, options.seconds, options.suffix)


def _run(rows: Sequence[str], device: str, seconds: float, suffix: str) -> bool:
    gpu = torch.cuda.get_device_name() if torch.device(device).type == "cuda" else "CPU"
    today = datetime.datetime.now(datetime.timezone.utc).date()
    file = "-".join(filter(None, (re.sub("[^a-z0-9]+", "-", gpu.lower()).strip("-"), str(today), suffix)))
    found: dict[str, Any] = {}

    def keep(row: str, result: Any, taken: float) -> None:
        found[row] = result
        _write(file, f"Pipelines on {gpu}", found)
        print(f"{row}, {taken:.0f} s: {result}", flush=True)

    command = case_processes.command_of("bench.gpu.cuda", "--device", device)
    for row in case_processes.run_cases(command, rows, seconds, keep, ROW_SECONDS):
        keep(row, "skipped: no time left", 0.0)
    good = [row for row in found if not any(word in str(found[row]) for word in _INCOMPLETE)]
    print(f"{len(good)} of {len(rows)} rows are complete", flush=True)
    return len(good) == len(rows)


def _write(file: str, title: str, found: Mapping[str, Any]) -> None:
    tables = [table for row, result in found.items() for table in tables_of(row, result)]
    versions = [f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"]
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        versions.append(f"{gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}")
    note = f"{', '.join(versions)}. {NOTE}\n## {tables[0].heading}\n\n{tables[0].note}"
    measure.write(file, title, tables[0].headers, tables[0].rows, note, tables[1:])


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:]) else 1)
