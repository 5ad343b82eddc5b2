"""Counts the bytes that stages move, and their launches, with and without fused kernels; needs no GPU.

`python -m tools fusion` traces the stages of `tools/stages.py` on the fake CUDA runtime of
tests/fake_cuda, lowers them and counts the programs' steps. `python -m tools fusion --left STAGE PRECISION`
prints what the operators and kernels of one stage move after fusion.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.measure import Table, report
from gpipe_fast.lower.work import Work
from tools.fusion_process import SIZES, Row
from tools.stages import LARGE, PRECISIONS, STAGES

ROOT = Path(__file__).parents[1]
SECONDS = 600
HEADERS = (
    "stage", "precision", "MB without fusion", "MB with fusion", "removed",
    "launches without fusion", "launches with fusion",
)  # fmt: skip
NOTE = (
    "Counted, not measured: what the lowered programs of one micro-batch read and write, and the calls, "
    "launches and accumulations that they consist of, in every micro-batch of a mini-batch but the first. "
    "Bytes leave out matrix products, convolutions and fused attention, except a matrix, other than an "
    "accumulator, to which a product is added; launches include them. An operator counts as one launch, "
    "though it may launch several kernels. Sizes: "
    f"batch {LARGE.batch}, sequence {LARGE.length}, width {LARGE.width}, {LARGE.heads} heads, {LARGE.vocab} "
    "classes. Precision 'autocast' has fp32 parameters and inputs, and casts to bf16. The graphs are those "
    "of a GPU of compute capability 9.0.\n"
)


def run(size: str, names: Sequence[str], runtime: Path) -> list[Row]:
    """Counts stages in a process with the fake CUDA runtime.

    Args:
        size: a key of `SIZES`.
        names: keys of `STAGES`.
        runtime: the library of the fake runtime.

    Raises:
        RuntimeError: the process failed.
    """
    variables = {"LD_PRELOAD": str(runtime), "PYTHONPATH": str(ROOT)}
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | variables
    command = [sys.executable, "-W", "ignore", "-m", "tools.fusion_process", size, *names]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise RuntimeError(f"counting {', '.join(names)} failed: {done.stdout}{done.stderr[-3000:]}")
    return [_row(json.loads(line)) for line in done.stdout.splitlines()]


def _row(found: dict[str, Any]) -> Row:
    found |= {key: Work(**found[key]) for key in ("before", "after")}
    return Row(**found)


def cells(row: Row) -> list[object]:
    """Returns a row of the table."""
    before, after = row.before, row.after
    removed = f"{1 - after.moved / before.moved:.0%}"
    megabytes = (f"{work.moved / 1e6:.1f}" for work in (before, after))
    return [row.stage, row.precision, *megabytes, removed, before.launches, after.launches]


def left(work: Work) -> list[list[object]]:
    """Returns megabytes, share of bytes and launches by operator or kernel, largest first."""
    return [
        [name, f"{moved / 1e6:.1f}", f"{moved / work.moved:.1%}", work.launches_of[name]]
        for name, moved in sorted(work.moved_by.items(), key=lambda item: -item[1])
    ]


def tables(rows: Iterable[Row]) -> tuple[list[list[object]], Table]:
    """Returns the rows of the recomputing backward, and a table of the forward."""
    rows = list(rows)
    backward = [cells(row) for row in rows if row.program != "forward"]
    forward = [cells(row) for row in rows if row.program == "forward"]
    return backward, Table("Forward", HEADERS, forward)


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.fusion", description=__doc__)
    parser.add_argument("--left", nargs=2, metavar=("STAGE", "PRECISION"), help="print one stage's operators")
    parser.add_argument("--size", choices=SIZES, default="large")
    options = parser.parse_args(arguments)
    from tests.fake_cuda.build import build, can_build

    if not can_build():
        print("fusion: skipped, needs an extension built with CUDA and the toolkit's headers")
        return
    runtime, _ = build()
    if options.left is not None:
        stage, precision = options.left
        if stage not in STAGES or precision not in PRECISIONS:
            parser.error(f"choose from {', '.join(STAGES)} and {', '.join(PRECISIONS)}")
        for row in run(options.size, [stage], runtime):
            if row.precision == precision:
                table = Table(row.program, ("name", "MB", "share", "launches"), left(row.after))
                _print(table)
        return
    backward, forward = tables(run(options.size, list(STAGES), runtime))
    report("fusion", "Bytes and launches of stages with fused kernels", HEADERS, backward, NOTE, [forward])


def _print(table: Table) -> None:
    from tabulate import tabulate

    print(f"{table.heading}\n\n{tabulate(list(table.rows), headers=table.headers, tablefmt='github')}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
