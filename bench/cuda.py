"""Steps on a GPU, four stages on one, against plain PyTorch and torchgpipe: `python -m bench.cuda [row ...]`.

Every row is measured in a process of its own. What is known is written after each, so that a run that is cut
off keeps what it has; a candidate that takes its process with it is left out of another try.
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

from bench import cuda_copies, cuda_report, measure
from bench.cuda_subjects import ROWS

SECONDS = float(os.environ.get("GPIPE_FAST_BENCH_SECONDS", "480"))
# Copies are quick, and may matter most.
ORDER = ("tiny-never", "tiny-always", cuda_copies.NAME, *list(ROWS)[2:])
# A row may take so many times what it needs at least; a process that hangs takes no more from the others.
PATIENCE = 3
COPIES_SECONDS = 20


@dataclass
class Attempt:
    """What a process has left behind.

    Attributes:
        found: its findings, or nothing.
        fault: why it did not end well; None if it did.
    """

    found: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None


# By name, seconds, and who is left out.
Launch = Callable[[str, float, Collection[str]], Attempt]


def in_a_process(device: str, small: bool) -> Launch:
    """Measures a row in a process of its own, which gets four fifths of the time to end by itself."""

    def launch(name: str, seconds: float, without: Collection[str]) -> Attempt:
        with tempfile.TemporaryDirectory() as folder:
            path, words = Path(folder) / "findings.json", Path(folder) / "words"
            command = [sys.executable, "-X", "faulthandler", "-m", "bench.cuda_row", name, str(path)]
            command += ["--device", device, "--seconds", str(0.8 * seconds), *(["--small"] if small else [])]
            command += [word for each in without for word in ("--without", each)]
            fault = None
            # To a file: whoever else has the error output open may outlive the process.
            with words.open("w") as file:
                try:
                    code = subprocess.run(command, cwd=measure.ROOT, stderr=file, timeout=seconds).returncode
                    if code:
                        fault = f"ended with {code}; {_last(words)}"
                except subprocess.TimeoutExpired:
                    fault = f"did not end within {seconds:.0f} s; {_last(words)}"
            found = json.loads(path.read_text()) if path.exists() else {}
        return Attempt(found, fault)

    return launch


def _last(words: Path) -> str:
    """Lines of an error output."""
    lines = [line for line in words.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(line for line in lines if not line.startswith("USDT"))[-800:]


def attempt(name: str, launch: Launch, deadline: float, least: float) -> dict[str, Any]:
    """A row: who takes its process with it is left out, as often as time allows."""
    begin, failed = time.monotonic(), dict[str, str]()
    row: dict[str, Any] = {"candidates": {}, "remarks": []}
    while True:
        seconds = min(deadline - time.monotonic(), PATIENCE * least)
        if seconds < least:
            row["remarks"].append(f"no more tries: {max(seconds, 0):.0f} s were left, {least:.0f} are wanted")
            break
        found = launch(name, seconds, tuple(failed))
        row["candidates"] |= found.found.get("candidates", {})
        row["remarks"] += found.found.get("remarks", [])
        if found.fault is None:
            break
        blamed = [n for n, c in row["candidates"].items() if "failed" in c and n not in failed]
        if (at := found.found.get("at")) and at not in failed:
            blamed.append(at)
        if not blamed:
            row["failed"] = found.fault
            break
        for each in blamed:
            reason = row["candidates"].setdefault(each, {}).setdefault("failed", found.fault)
            failed[each] = reason
    for each, reason in failed.items():
        row["candidates"][each]["failed"] = reason
    return row | {"seconds": time.monotonic() - begin}


def least_seconds(name: str) -> float:
    return COPIES_SECONDS if name == cuda_copies.NAME else ROWS[name].least


class Results:
    """The JSON and the Markdown of one run, written again with every row.

    Args:
        device: where the stages are.
        seconds: that the run has.
        small: whether models are small ones.
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
        """Adds a row, and writes all."""
        self.found["rows"][name] = row
        measure.RESULTS.mkdir(exist_ok=True)
        path = measure.RESULTS / f"{self.name}.json"
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(self.found, indent=1) + "\n")
        os.replace(beside, path)
        cuda_report.write(self.name, self.device, self.found)


def bench(
    names: Sequence[str], seconds: float, results: Results, launch: Launch, say: Callable[[str], None] = print
) -> None:
    """Measures rows in the order given, as far as time goes."""
    deadline = time.monotonic() + seconds
    for name in names:
        left, least = deadline - time.monotonic(), least_seconds(name)
        if left < least:
            row: dict[str, Any] = {"skipped": f"{max(left, 0):.0f} s were left, {least:.0f} are wanted"}
        else:
            row = attempt(name, launch, deadline, least)
        results.keep(name, row)
        say(cuda_report.line(name, row))


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cuda", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"of {', '.join(ORDER)}; by default all")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that the run has")
    parser.add_argument("--device", default="cuda:0", help="on which all stages are")
    parser.add_argument("--small", action="store_true", help="measure small models")
    wanted = parser.parse_args(arguments)
    unknown = [name for name in wanted.name if name not in ORDER]
    if unknown:
        parser.error(f"no row is called {', '.join(unknown)}; there are {', '.join(ORDER)}")
    if wanted.device.startswith("cuda") and not torch.cuda.is_available():
        print("cuda: needs a GPU, and none is visible; nothing is written", flush=True)
        return
    results = Results(wanted.device, wanted.seconds, wanted.small)
    bench(
        wanted.name or ORDER, wanted.seconds, results, in_a_process(wanted.device, wanted.small),
        lambda text: print(text, flush=True),
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
