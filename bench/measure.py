"""Times alternating candidates in one run, and reports the results with a description of the machine."""

from __future__ import annotations

import itertools
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from bench.peers import TOLERANCE
from bench.progress import shown

ROOT = Path(__file__).parents[1]
RESULTS = Path(os.environ.get("GPIPE_FAST_RESULTS", ROOT / "bench" / "results"))
# The time of the rounds of one comparison, which `make results` limits, and the rounds that run in any case.
ROUND_SECONDS = float(os.environ.get("GPIPE_FAST_ROUND_SECONDS", "inf"))
MIN_ROUNDS = 5
# Seconds before a sample, in which the threads of the previous candidate stop spinning.
PAUSE = 0.05
_EXPONENT = re.compile(r"\d+(\.\d+)?e[-+]\d+")

# The headers of a table, or one text in which " | " is between them.
Headers = Sequence[str] | str


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median and the 20th and 80th percentiles."""

    median: float
    p20: float
    p80: float

    def __str__(self) -> str:
        return self._text(1, 1 if self.median < 1000 else 0)

    def ms(self) -> str:
        """Formats the timing in milliseconds."""
        return self._text(1e-3, 2 if self.median < 1e5 else 1)

    def _text(self, factor: float, digits: int) -> str:
        median, p20, p80 = (f"{time * factor:.{digits}f}" for time in (self.median, self.p20, self.p80))
        return f"{median} [{p20}, {p80}]"


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios, and its 95% confidence interval by bootstrapping."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numerators: Sequence[float], denominators: Sequence[float], resamples: int = 2000) -> Ratio:
        """Computes the ratio ``ours / theirs`` of two candidates' samples, paired by round."""
        ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
        generator = random.Random(0)
        medians = [statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(resamples)]
        cuts = statistics.quantiles(medians, n=40)
        return cls(statistics.median(ratios), cuts[0], cuts[-1])

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Table:
    """An additional table of a report, with its own heading."""

    heading: str
    headers: Headers
    rows: Iterable[Sequence[object]]
    note: str = ""


def samples(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int = 1,
    pause: float = 0.0,
    seconds: float = float("inf"),
) -> dict[str, list[float]]:
    """Returns the microseconds per call of each round, by candidate.

    Every candidate runs once per round, so that a slow phase of the machine affects all of them. The order is
    rotated from round to round, so that no candidate always follows the same one.

    Args:
        candidates: the functions to time, by name.
        rounds: samples per candidate. One additional warm-up round is dropped.
        calls: calls per sample.
        pause: seconds before each sample, in which threads of the previous candidate stop spinning.
        seconds: after so many, or after `GPIPE_FAST_ROUND_SECONDS`, no round begins that is not among the
            first five.
    """
    found: dict[str, list[float]] = {name: [] for name in candidates}
    end = time.monotonic() + min(seconds, ROUND_SECONDS)
    for round_index in shown(range(rounds + 1), "timing rounds"):
        if round_index > MIN_ROUNDS and time.monotonic() > end:
            break
        first = round_index % max(1, len(candidates))
        for name in [*candidates][first:] + [*candidates][:first]:
            if pause:
                time.sleep(pause)
            start = time.perf_counter()
            for _ in range(calls):
                candidates[name]()
            if round_index:
                found[name].append((time.perf_counter() - start) / calls * 1e6)
    return found


def timing(times: Sequence[float]) -> Timing:
    """Computes the timing from samples."""
    cuts = statistics.quantiles(times, n=10) if len(times) > 1 else [times[0]] * 9
    return Timing(statistics.median(times), cuts[1], cuts[7])


def machine() -> str:
    """Describes processor, versions, threads and commit in one line."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{model}, {os.cpu_count()} cores{gpu}; "
        f"Python {platform.python_version()}, torch {torch.__version__}; "
        f"{torch.get_num_threads()} intra-op threads; commit {commit()}"
        + (f"; rounds of at most {ROUND_SECONDS:g} s" if float("inf") > ROUND_SECONDS else "")
    )


def _git(*arguments: str) -> str:
    if not shutil.which("git"):
        return ""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT).stdout.strip()


def uncommitted(*excluded: str) -> str:
    """Returns the files with uncommitted changes, except for files that match a pattern, as text."""
    return _git(
        "status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!{each}" for each in excluded)
    )


def commit() -> str:
    """Returns the abbreviated commit of the tree, with "+changes" if code has uncommitted changes."""
    # For a tree that was copied without its history, the environment variable gives the commit.
    if given := os.environ.get("GPIPE_FAST_COMMIT"):
        return given
    changed = "+changes" if uncommitted("bench/results", "docs", "*.md") else ""
    return (_git("rev-parse", "--short", "HEAD") or "unknown") + changed


def report(
    module: Mapping[str, Any],
    headers: Headers,
    rows: Iterable[Sequence[object]],
    more_tables: Sequence[Table] = (),
    **values: object,
) -> None:
    """Prints the tables of a module, and writes them to ``bench/results/<module>.md``.

    Args:
        module: its ``globals()``. Its docstring is the title and the note; names in braces are its values.
        headers: the headers of the first table.
        rows: its rows.
        more_tables: further tables.
        values: values that the docstring names, besides those of the module.
    """
    title, _, note = (
        module["__doc__"].format(**{"TOLERANCE": TOLERANCE, **module, **values}).partition("\n\n")
    )
    name = module["__name__"].rpartition(".")[2]
    print(write(name, " ".join(title.split()).rstrip("."), headers, rows, note, more_tables), flush=True)


def write(
    name: str,
    title: str,
    headers: Headers,
    rows: Iterable[Sequence[object]],
    note: str = "",
    more_tables: Sequence[Table] = (),
) -> str:
    """Writes tables with the machine line to ``bench/results/<name>.md``, and returns the text."""
    text = f"# {title}\n\n{machine()}.\n{note}\n{_table(headers, rows)}\n"
    for table in more_tables:
        text += f"\n## {table.heading}\n\n{table.note}\n{_table(table.headers, table.rows)}\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    return text


def _table(headers: Headers, rows: Iterable[Sequence[object]]) -> str:
    names = headers.split(" | ") if isinstance(headers, str) else list(headers)
    cells = [list(row) for row in rows]
    # Small numbers with an exponent stay as they are.
    columns = itertools.zip_longest(*cells)
    as_given = [i for i, column in enumerate(columns) if any(map(_EXPONENT.fullmatch, map(str, column)))]
    text: str = tabulate(
        cells, headers=names, tablefmt="github", floatfmt=".2f", disable_numparse=as_given or False
    )
    return text
