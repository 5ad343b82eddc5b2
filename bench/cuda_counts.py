"""What a step costs on GPUs, counted without one: launches, bytes, casts, events and calls of the runtime.

`python -m bench cuda-counts` runs steps on the CUDA runtime of tests/fake_cuda, reads its log, and keeps the
table. `python -m bench.cuda_counts --before FOLDER` counts those of the built tree in FOLDER too.
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

from bench.cuda_counted import BATCH, BEGIN, CHUNKS, END, HEADS, LENGTH, STAGES, WIDTH, Setup
from bench.measure import Table, report

ROOT = Path(__file__).parents[1]
SECONDS = 300
HEADERS = (
    "devices", "how", "precision", "tree", "host calls", "operators launched", "graphs launched",
    "graph nodes", "MB read", "MB written", "MB copied", "casts", "casts of parameters",
    "events recorded", "stream waits",
)  # fmt: skip
# Lines of the log that are no call of the runtime.
NO_CALLS = {"read", "write", "mark", "stream"}
NOTE = (
    "One training step after warm-up, forward and backward given the gradient of the output, without an "
    "optimizer, counted in the log of the CUDA runtime without a GPU in tests/fake_cuda; there are no times. "
    f"The models are GPTs in {STAGES} stages, width {WIDTH}, {HEADS} heads, sequence {LENGTH}, "
    f"batch {BATCH}, {CHUNKS} micro-batches, checkpoint 'except_last'; the plain loop recomputes all. "
    "Host calls are all that the host asks of the runtime: launches, copies, fills, events, waits, queries, "
    "allocations. An operator that is no view counts as one launch; a real one may launch several kernels. "
    "Operators, copies and fills in a replayed graph are its nodes, and no host calls. Bytes are those of "
    "the tensors that operators read and write, replayed or not, and of copies and fills. A cast is a copy "
    "from one dtype to another. Every fp32 weight that autocast casts once is one cast of a parameter. "
    "Attention is in its mathematical form, since the runtime has no other.\n"
)


@dataclass
class Counts:
    """What one step did.

    Attributes:
        calls: of the host, by kind of line in the log; those of operators are called 'operator'.
        nodes: of replayed graphs, by the same kinds.
        operators: by name, replayed or not.
        casts: by the two types.
        parameter_casts: those that read a parameter.
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
    """Counts what a log has between the marks.

    Args:
        lines: of the log.
        parameters: addresses, as the log writes them.
    """
    counts, inside = Counts(), False
    graphs: dict[str, str] = {}  # threads that launch one, and the stream that will wait for it
    for line in lines:
        thread, kind, *words = line.rstrip("\n").split("\t")
        if kind == "mark" and words[0] in (BEGIN, END):
            inside = words[0] == BEGIN
        elif inside and kind == "launch":
            counts.calls[kind] += 1
            graphs[thread] = words[0]
        elif inside:
            _take(counts, kind, words, counts.nodes if thread in graphs else counts.calls, parameters)
            if kind == "wait" and words[:2] == [graphs.get(thread), "-1"]:
                del graphs[thread]
    return counts


def _take(
    counts: Counts, kind: str, words: Sequence[str], where: Counter[str], parameters: Container[str]
) -> None:
    if kind == "mark" and words[0] == "operator":
        _, name, *cast = words
        where["operator"] += 1
        counts.operators[name] += 1
        if cast:
            source, target, address = cast
            counts.casts[f"{source} to {target}"] += 1
            counts.parameter_casts += address in parameters
    elif kind == "read":
        counts.read += int(words[-1])
    elif kind == "write":
        counts.written += int(words[-1])
    elif kind not in NO_CALLS:
        where[kind] += 1
        counts.copied += int(words[-1]) if kind in ("copy", "memset") else 0


def run(setup: Setup, libraries: tuple[Path, Path], package: Path = ROOT) -> Counts:
    """Trains on the runtime that is not there.

    Raises:
        RuntimeError: the process failed, or a step was not replayed that should have been.
    """
    runtime, operators = libraries
    command = [sys.executable, "-W", "ignore", "-m", "bench.cuda_counted", str(operators), str(package)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        own = {"LD_PRELOAD": str(runtime), "FAKE_CUDA_LOG": str(log), "FAKE_CUDA_NAMES": "1"}
        own |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | own
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
    if setup.how == "captured" and not counts.calls["launch"]:
        raise RuntimeError(f"{setup} was not replayed:\n{done.stdout}")
    return counts


def setups(blocks: int = 24) -> list[Setup]:
    """What the table has."""
    precisions = ("fp32", "bf16", "autocast")
    found = [Setup("plain loop", precision, blocks=blocks) for precision in precisions]
    for devices in (1, 4):
        for how in ("uncaptured", "captured"):
            found += [Setup(how, precision, devices, blocks) for precision in precisions]
    return [*found, Setup("captured", "fp32", blocks=blocks, dropout=0.1)]


def tables(found: Sequence[tuple[str, Setup, Counts]]) -> tuple[list[list[object]], Table]:
    """The counts, and how often each operator is launched on one device."""
    rows: list[list[object]] = []
    for tree, setup, counts in found:
        precision = setup.precision + (f", dropout {setup.dropout:g}" if setup.dropout else "")
        rows.append([setup.devices, setup.how, precision, tree, *counts.cells()])
    columns = {
        f"{setup.how}, {precision}, {tree}": counts
        for (tree, setup, counts), (_, _, precision, *_) in zip(found, rows, strict=True)
        if setup.devices == 1 and setup.how != "uncaptured"
    }
    total = sum((counts.operators + counts.casts for counts in columns.values()), Counter[str]())
    lines = [
        [name, *((counts.operators + counts.casts)[name] for counts in columns.values())]
        for name, _ in sorted(total.items(), key=lambda item: (-item[1], item[0]))
    ]
    note = "Casts, by their two types, are among the launches of aten::copy_.\n"
    return rows, Table("Operators on one device", ["operator", *columns], lines, note)


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cuda_counts", description=__doc__)
    parser.add_argument("--before", type=Path, help="a built tree whose steps are counted too")
    wanted = parser.parse_args(arguments)
    from tests.fake_cuda.build import build, can_build

    if not can_build():
        print(
            "cuda-counts: needs an extension built with CUDA, and the toolkit's headers; nothing is written"
        )
        return
    libraries, packages = build(), {"now": ROOT}
    if wanted.before is not None:
        packages = {"before": wanted.before.resolve()} | packages
    found = []
    for setup in setups():
        for tree, package in packages.items():
            if setup.how != "plain loop" or tree == "now":
                print(f"counting {setup}, {tree}", file=sys.stderr, flush=True)
                found.append((tree, setup, run(setup, libraries, package)))
    rows, operators = tables(found)
    report("cuda_counts", "What a step on GPUs is made of", HEADERS, rows, NOTE, [operators])


if __name__ == "__main__":
    main(sys.argv[1:])
