"""The cost of a step on GPUs, counted without a GPU: launches, bytes, casts, events and CUDA runtime calls.

`python -m tools cuda-counts` runs steps on the fake CUDA runtime of tests/fake_cuda, reads its log and writes
the table. `python -m tools.cuda_counts --before FOLDER` also counts the steps of the built tree in FOLDER.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.measure import Table, report
from tools.cuda_counts_process import BATCH, BEGIN, CHUNKS, END, HEADS, LENGTH, STAGES, WIDTH, Setup

ROOT = Path(__file__).parents[1]
SECONDS = 300
HEADERS = (
    "devices", "mode", "precision", "tree", "host calls", "operators launched", "graphs launched",
    "graph nodes", "MB read", "MB written", "MB copied", "casts", "casts of parameters",
    "events recorded", "stream waits",
)  # fmt: skip
# Log lines that are not runtime calls.
NON_CALLS = {"read", "write", "mark", "stream"}
NOTE = (
    "One training step after warm-up: forward and backward from a given output gradient, without an "
    "optimizer. The counts come from the log of the fake CUDA runtime in tests/fake_cuda; no time is "
    f"measured. The model is a GPT in {STAGES} stages, width {WIDTH}, {HEADS} heads, sequence {LENGTH}, "
    f"batch {BATCH}, {CHUNKS} micro-batches, checkpoint 'except_last'; the plain loop recomputes every "
    "micro-batch. Host calls are all calls into the runtime: launches, copies, fills, events, waits, queries "
    "and allocations. Each operator other than a view counts as one launch; on a GPU it may launch several "
    "kernels. Operators, copies and fills inside a replayed graph count as graph nodes, not as host calls. "
    "Bytes are the sizes of the tensors that operators read and write, replayed or not, and of copies and "
    "fills. A cast is a copy between dtypes. Casts of parameters are the casts of fp32 weights by autocast. "
    "Attention uses its mathematical form, the only one that the fake runtime supports.\n"
)


@dataclass
class Counts:
    """What one step did.

    Attributes:
        calls: host calls by kind of log line; operator launches have the kind 'operator'.
        nodes: nodes of replayed graphs, by the same kinds.
        operators: operators by name, replayed or not.
        casts: casts by source and target dtype.
        parameter_casts: casts that read a parameter.
        read, written, copied: bytes.
    """

    calls: Counter[str] = field(default_factory=Counter)
    nodes: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    casts: Counter[str] = field(default_factory=Counter)
    parameter_casts: int = 0
    read: int = 0
    written: int = 0
    copied: int = 0

    def cells(self) -> list[object]:
        launched = ("operator", "kernel")
        nodes = sum(self.nodes[kind] for kind in (*launched, "copy", "memset"))
        return [
            sum(self.calls.values()),
            sum(self.calls[kind] for kind in launched),
            self.calls["launch"],
            nodes,
            *(f"{count / 1e6:.2f}" for count in (self.read, self.written, self.copied)),
            sum(self.casts.values()),
            self.parameter_casts,
            self.calls["record"],
            self.calls["wait"],
        ]


def count(lines: Iterable[str], parameters: Container[str] = ()) -> Counts:
    """Counts the log lines between the marks.

    Args:
        lines: lines of the log.
        parameters: addresses of the parameters, in the log's notation.
    """
    counts, inside = Counts(), False
    graphs: dict[str, str] = {}  # threads that are launching a graph, and the stream that will wait for it
    for line in lines:
        thread, kind, *words = line.rstrip("\n").split("\t")
        if kind == "mark" and words[0] in (BEGIN, END):
            inside = words[0] == BEGIN
        elif inside and kind == "launch":
            counts.calls[kind] += 1
            graphs[thread] = words[0]
        elif inside:
            _count_line(counts, kind, words, counts.nodes if thread in graphs else counts.calls, parameters)
            if kind == "wait" and words[:2] == [graphs.get(thread), "-1"]:
                del graphs[thread]
    return counts


def _count_line(
    counts: Counts, kind: str, words: Sequence[str], counter: Counter[str], parameters: Container[str]
) -> None:
    if kind == "mark" and words[0] == "operator":
        _, name, *cast = words
        counter["operator"] += 1
        counts.operators[name] += 1
        if cast:
            _count_cast(counts, cast, parameters)
    elif kind == "mark" and words[0] == "cast":
        _count_cast(counts, words[1:], parameters)
    elif kind == "read":
        counts.read += int(words[-1])
    elif kind == "write":
        counts.written += int(words[-1])
    elif kind not in NON_CALLS:
        counter[kind] += 1
        counts.copied += int(words[-1]) if kind in ("copy", "memset") else 0


def _count_cast(counts: Counts, cast: Sequence[str], parameters: Container[str]) -> None:
    source, target, address = cast
    counts.casts[f"{source} to {target}"] += 1
    counts.parameter_casts += address in parameters


def run(setup: Setup, libraries: tuple[Path, Path], package: Path = ROOT) -> Counts:
    """Trains on the fake CUDA runtime and returns the counts of the last step.

    Raises:
        RuntimeError: the process failed, or a captured step was not replayed.
    """
    runtime, operators = libraries
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tools.cuda_counts_process",
        str(operators),
        str(package),
    ]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        variables = {"LD_PRELOAD": str(runtime), "FAKE_CUDA_LOG": str(log), "FAKE_CUDA_NAMES": "1"}
        variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GPIPE_FAST_DISABLE": "fuse"}
        environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | variables
        done = subprocess.run(
            [*command, setup.text()],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        if done.returncode:
            raise RuntimeError(f"{setup}: {done.stdout}{done.stderr[-3000:]}")
        with log.open() as lines:
            counts = count(lines, set(done.stdout.partition("\n")[0].split()))
    if setup.mode == "captured" and not counts.calls["launch"]:
        raise RuntimeError(f"{setup} was not replayed:\n{done.stdout}")
    return counts


def setups(blocks: int = 24) -> list[Setup]:
    """Returns the setups of the table."""
    precisions = ("fp32", "bf16", "autocast")
    found = [Setup("plain loop", precision, blocks=blocks) for precision in precisions]
    for devices in (1, 4):
        for mode in ("uncaptured", "captured"):
            found += [Setup(mode, precision, devices, blocks) for precision in precisions]
    return [*found, Setup("captured", "fp32", blocks=blocks, dropout=0.1)]


def tables(found: Sequence[tuple[str, Setup, Counts]]) -> tuple[list[list[object]], Table]:
    """Returns the rows of counts, and a table of operator launches on one device."""
    rows: list[list[object]] = []
    for tree, setup, counts in found:
        precision = setup.precision + (f", dropout {setup.dropout:g}" if setup.dropout else "")
        rows.append([setup.devices, setup.mode, precision, tree, *counts.cells()])
    columns = {
        f"{setup.mode}, {precision}, {tree}": counts
        for (tree, setup, counts), (_, _, precision, *_) in zip(found, rows, strict=True)
        if setup.devices == 1 and setup.mode != "uncaptured"
    }
    total = sum((counts.operators + counts.casts for counts in columns.values()), Counter[str]())
    lines = [
        [name, *((counts.operators + counts.casts)[name] for counts in columns.values())]
        for name, _ in sorted(total.items(), key=lambda item: (-item[1], item[0]))
    ]
    note = "Casts, listed by source and target dtype, are also counted as aten::copy_.\n"
    return rows, Table("Operators on one device", ["operator", *columns], lines, note)


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.cuda_counts", description=__doc__)
    parser.add_argument("--before", type=Path, help="a built tree whose steps are also counted")
    options = parser.parse_args(arguments)
    from tests.fake_cuda.build import build, can_build

    if not can_build():
        print("cuda-counts: skipped, needs an extension built with CUDA and the toolkit's headers")
        return
    libraries, packages = build(), {"now": ROOT}
    if options.before is not None:
        packages = {"before": options.before.resolve()} | packages
    found = []
    for setup in setups():
        for tree, package in packages.items():
            if setup.mode != "plain loop" or tree == "now":
                print(f"counting {setup}, {tree}", file=sys.stderr, flush=True)
                found.append((tree, setup, run(setup, libraries, package)))
    rows, operators = tables(found)
    report(
        "cuda_counts", "Launches, bytes and runtime calls of a step on GPUs", HEADERS, rows, NOTE, [operators]
    )


if __name__ == "__main__":
    main(sys.argv[1:])
