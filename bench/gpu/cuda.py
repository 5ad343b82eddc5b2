"""Steps of four stages on one GPU, compared with plain PyTorch and torchgpipe.

`python -m bench cuda [row ...]` measures each row in a process of its own, in which the candidates alternate.
Results are written after each row, so an interrupted run keeps the rows that it finished. With `--device cpu`
it measures small models, whose figures are meaningless.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from bench import measure
from bench.comparison import Outcome, compare
from bench.gpu import copies
from bench.gpu.rows import RowBenchmark
from bench.gpu.subjects import (
    LOOP,
    MAX_ERROR_RATIO,
    OURS,
    PIPELINES,
    ROWS,
    STAGES,
    UNCAPTURED,
    Row,
    errors_of,
    steps_of,
)

# Seconds of the rounds of one row, and its time limit in all; an H200 took 56 for a GPT with all kernels in
# caches, and over 120 without. torch.compile takes minutes for a whole model.
ROUND_SECONDS, ROW_SECONDS = 15.0, 240.0
ORDER = (*ROWS, copies.NAME)
HEADERS = ["candidate", "ms: median [p20, p80]", "per second", "speedup of gpipe_fast", "peak, MiB", "error"]
NOTE = (
    "All stages share one device. A step is forward and backward from a given output gradient, until the "
    "device has finished. Plain loops recompute each stage as a whole with non-reentrant "
    "torch.utils.checkpoint. Speedups are paired by round: the median with its 95% confidence interval, "
    "beside steps that are not captured if captured ones are not measured. "
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
    steps = steps_of(subject, [name for name in right if name not in row.untimed], device, backend)
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
        ours = found.get(OURS, found.get(UNCAPTURED, Outcome())).times
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


def measured_row(name: str, device: str) -> Any:
    """Measures a row in this process."""
    return copies.rows(device) if name == copies.NAME else rows_of(ROWS[name], device)


BENCHMARK = RowBenchmark(
    "bench.gpu.cuda", "Pipelines", NOTE, ORDER, measured_row, lambda *row: [table_of(*row)], ROW_SECONDS
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:]) else 1)
