"""Steps of four stages on one GPU, compared with plain PyTorch and torchgpipe.

`python -m bench cuda [row ...]` measures every row in its own process. Results are written after each row, so
an interrupted run keeps the rows that it finished. A candidate that crashes its process is excluded when the
row is retried.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import measure
from bench.gpu import copies as cuda_copies
from bench.gpu import report as cuda_report
from bench.gpu.subjects import ROWS

SECONDS = float(os.environ.get("GPIPE_FAST_BENCH_SECONDS", "480"))
# Copies come early: they are quick and may matter most.
ORDER = ("tiny-never", "tiny-always", cuda_copies.NAME, *list(ROWS)[2:])
# Time limit of a row, as a multiple of its minimum time; bounds what a hanging process costs the other rows.
MAX_TIME_FACTOR = 3
COPIES_SECONDS = 20


@dataclass
class ProcessOutcome:
    """The outcome of one measuring process.

    Attributes:
        found: its findings; empty if it wrote none.
        failure: why the process failed; None if it succeeded.
    """

    found: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None


# Arguments: row name, seconds, excluded candidates.
Launch = Callable[[str, float, Collection[str]], ProcessOutcome]


def subprocess_launcher(device: str, small: bool) -> Launch:
    """Returns a launcher that runs a row in a new process, which gets 80% of the time to exit by itself."""

    def launch(name: str, seconds: float, without: Collection[str]) -> ProcessOutcome:
        with tempfile.TemporaryDirectory() as folder:
            path, stderr_path = Path(folder) / "findings.json", Path(folder) / "stderr"
            command = [sys.executable, "-X", "faulthandler", "-m", "bench.gpu.row", name, str(path)]
            command += ["--device", device, "--seconds", str(0.8 * seconds), *(["--small"] if small else [])]
            command += [word for each in without for word in ("--without", each)]
            failure = None
            # stderr goes to a file, not a pipe: a grandchild may keep it open after the process exits.
            with stderr_path.open("w") as file:
                try:
                    code = subprocess.run(command, cwd=measure.ROOT, stderr=file, timeout=seconds).returncode
                    if code:
                        failure = f"ended with {code}; {_last_lines(stderr_path)}"
                except subprocess.TimeoutExpired:
                    failure = f"did not end within {seconds:.0f} s; {_last_lines(stderr_path)}"
            found = json.loads(path.read_text()) if path.exists() else {}
        return ProcessOutcome(found, failure)

    return launch


def _last_lines(stderr_path: Path) -> str:
    """Returns the last lines of a stderr file."""
    lines = [line for line in stderr_path.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(line for line in lines if not line.startswith("USDT"))[-800:]


def measure_with_retries(name: str, launch: Launch, deadline: float, min_seconds: float) -> dict[str, Any]:
    """Measures a row; excludes candidates that crash the process and retries while time remains."""
    begin, failed = time.monotonic(), dict[str, str]()
    row: dict[str, Any] = {"candidates": {}, "remarks": []}
    while True:
        seconds = min(deadline - time.monotonic(), MAX_TIME_FACTOR * min_seconds)
        if seconds < min_seconds:
            row["remarks"].append(
                f"no further retry: {max(seconds, 0):.0f} s left, {min_seconds:.0f} s needed"
            )
            break
        found = launch(name, seconds, tuple(failed))
        row["candidates"] |= found.found.get("candidates", {})
        row["remarks"] += found.found.get("remarks", [])
        if found.failure is None:
            break
        culprits = [n for n, c in row["candidates"].items() if "failed" in c and n not in failed]
        if (at := found.found.get("at")) and at not in failed:
            culprits.append(at)
        if not culprits:
            row["failed"] = found.failure
            break
        for each in culprits:
            reason = row["candidates"].setdefault(each, {}).setdefault("failed", found.failure)
            failed[each] = reason
    for each, reason in failed.items():
        row["candidates"][each]["failed"] = reason
    return row | {"seconds": time.monotonic() - begin}


def row_min_seconds(name: str) -> float:
    return COPIES_SECONDS if name == cuda_copies.NAME else ROWS[name].min_seconds


class Results:
    """The JSON and Markdown files of one run, rewritten after every row.

    Args:
        device: device of the stages.
        seconds: time limit of the run.
        small: whether the small models are measured.
    """

    def __init__(self, device: str, seconds: float, small: bool) -> None:
        gpu = torch.device(device).type == "cuda"
        self.device = torch.cuda.get_device_name() if gpu else "CPU"
        day = datetime.datetime.now(datetime.timezone.utc).date()
        self.name = f"{re.sub('[^a-z0-9]+', '-', self.device.lower()).strip('-')}-{day}"
        self.found: dict[str, Any] = {
            "machine": measure.machine(),
            "versions": cuda_report.versions(),
            "commit": measure.commit(),
            "date": str(day),
            "seconds": seconds,
            "small": small,
            "rows": {},
        }

    def keep(self, name: str, row: dict[str, Any]) -> None:
        """Adds a row and rewrites both files."""
        self.found["rows"][name] = row
        measure.RESULTS.mkdir(exist_ok=True)
        path = measure.RESULTS / f"{self.name}.json"
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(self.found, indent=1) + "\n")
        os.replace(temporary, path)
        cuda_report.write(self.name, self.device, self.found)


def bench(
    names: Sequence[str], seconds: float, results: Results, launch: Launch, log: Callable[[str], None] = print
) -> bool:
    """Measures the rows in the given order until time runs out; returns whether nothing failed or is left."""
    deadline, complete = time.monotonic() + seconds, 0
    for name in names:
        left, min_seconds = deadline - time.monotonic(), row_min_seconds(name)
        if left < min_seconds:
            row: dict[str, Any] = {"skipped": f"{max(left, 0):.0f} s left, {min_seconds:.0f} s needed"}
        else:
            row = measure_with_retries(name, launch, deadline, min_seconds)
        results.keep(name, row)
        log(cuda_report.line(name, row))
        candidates = row.get("candidates", {}).values()
        complete += not ({"skipped", "failed"} & row.keys() or any("failed" in each for each in candidates))
    log(f"{complete} of {len(names)} rows are complete")
    return complete == len(names)


def main(arguments: Sequence[str] = ()) -> bool:
    """Measures and returns whether every candidate of every row was measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.cuda", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"rows to measure, from {', '.join(ORDER)} (default: all)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of the run")
    parser.add_argument("--device", default="cuda:0", help="device of all stages")
    parser.add_argument("--small", action="store_true", help="measure small models")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.name if name not in ORDER]
    if unknown:
        parser.error(f"unknown row: {', '.join(unknown)}; choose from {', '.join(ORDER)}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("cuda: skipped, needs a GPU and none is visible", flush=True)
        return False
    results = Results(options.device, options.seconds, options.small)
    return bench(
        options.name or ORDER, options.seconds, results, subprocess_launcher(options.device, options.small),
        lambda text: print(text, flush=True),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:]) else 1)
