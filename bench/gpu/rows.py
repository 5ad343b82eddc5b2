"""Benchmarks on a GPU whose rows are measured in processes of their own, and written as each of them ends."""

from __future__ import annotations

import argparse
import datetime
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench import measure
from bench.gpu import children

SECONDS = float(os.environ.get("GPIPE_FAST_SECONDS", "480"))
# Words in a result that is not complete.
_INCOMPLETE = ("FAILED", "WRONG", "skipped")


@dataclass(frozen=True)
class RowBenchmark:
    """A benchmark of several rows.

    Attributes:
        module: its module, which calls `main`.
        title: the title of its file, to which the name of the GPU is added.
        note: what the file says about all tables.
        order: the names of its rows, the most important first.
        measured: measures a row on a device; returns what JSON can hold, or a text that says why it is none.
        tables_of: returns the tables of a row for its result.
        row_seconds: the time limit of one row.
        suffix: the end of the file's name, behind the GPU and the date.
    """

    module: str
    title: str
    note: str
    order: Sequence[str]
    measured: Callable[[str, str], Any]
    tables_of: Callable[[str, Any], Sequence[measure.Table]]
    row_seconds: float
    suffix: str = ""

    def main(self, arguments: Sequence[str] = ()) -> bool:
        """Measures the named rows, by default all, and returns whether all of them are complete."""
        name = self.module.rpartition(".")[2]
        parser = argparse.ArgumentParser(prog=f"python -m bench {name}")
        parser.add_argument("name", nargs="*", help=f"rows, from {', '.join(self.order)} (default: all)")
        parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of the run")
        parser.add_argument("--device", default="cuda:0", help="device of all stages")
        parser.add_argument("--suffix", default=self.suffix, help="end of the name of the written file")
        parser.add_argument("--here", action="store_true", help="measure in this process, for a parent")
        options = parser.parse_args(arguments)
        if unknown := [row for row in options.name if row not in self.order]:
            parser.error(f"unknown row: {', '.join(unknown)}; choose from {', '.join(self.order)}")
        device: str = options.device
        if options.here:
            children.serve(options.name, lambda row: self.measured(row, device))
            return True
        if device.startswith("cuda") and not torch.cuda.is_available():
            print(f"{name}: skipped, needs a GPU and none is visible", flush=True)
            return False
        return self._run(options.name or self.order, device, options.seconds, options.suffix)

    def _run(self, rows: Sequence[str], device: str, seconds: float, suffix: str) -> bool:
        gpu = torch.cuda.get_device_name() if torch.device(device).type == "cuda" else "CPU"
        file = "-".join(filter(None, (_slug(gpu), str(_today()), suffix)))
        found: dict[str, Any] = {}

        def keep(row: str, result: Any, taken: float) -> None:
            found[row] = result
            tables = [table for each, result in found.items() for table in self.tables_of(each, result)]
            note = f"{versions()}. {self.note}\n## {tables[0].heading}\n\n{tables[0].note}"
            title = f"{self.title} on {gpu}"
            measure.write(file, title, tables[0].headers, tables[0].rows, note, tables[1:])
            print(f"{row}, {taken:.0f} s: {result}", flush=True)

        options = ("--device", device)
        for row in children.run(self.module, rows, seconds, keep, options, self.row_seconds):
            keep(row, "skipped: no time left", 0.0)
        good = [row for row in found if not any(word in str(found[row]) for word in _INCOMPLETE)]
        print(f"{len(good)} of {len(rows)} rows are complete", flush=True)
        return len(good) == len(rows)


def _slug(text: str) -> str:
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.timezone.utc).date()


def versions() -> str:
    """Returns the versions of CUDA and cuDNN, and the memory of the GPU."""
    found = [f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"]
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found.append(f"{gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}")
    return ", ".join(found)
