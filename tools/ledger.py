"""What each mechanism gains that exists to make something faster or smaller: figures with and without it.

Each figure but those of the first row: {HOW} of {ROUNDS} processes, which alternate. Two stages, 4
micro-batches, one thread for each stage; lines of code by `.ci/count_lines.py`. Lines of tests are those of
files that test the mechanism alone. A further length is the fourth and fifth.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from bench import process, resident
from bench.measure import RESULTS, ROOT, Ratio, Table, commit, report
from bench.progress import shown

ROUNDS, STEPS, LENGTHS = 2, 20, (32, 48, 40, 56, 36)
# Further lengths, after which the memory that plans keep is compared.
FURTHER = range(65, 81)


@dataclass(frozen=True)
class Mechanism:
    """A mechanism that could be left out.

    Attributes:
        name: its name.
        files: its sources and its tests, as patterns.
        off: turns it off in this process.
    """

    name: str
    files: Sequence[str]
    off: Callable[[], None]


def _replace(place: str, name: str, value: object) -> None:
    setattr(importlib.import_module(place), name, value)


def _environment(name: str, value: str) -> Callable[[], None]:
    return lambda: os.environ.update({name: value})


def _collect_in_traces() -> None:
    # `collector_paused` decorates functions of imported modules; it does nothing where collections are off.
    _replace("gpipe_fast.trace.garbage", "gc", SimpleNamespace(**{**vars(gc), "isenabled": lambda: False}))


def _without_losses() -> None:
    for name in ("gradients_in", "losses_in"):
        _replace("gpipe_fast.fuse.fuse", name, lambda graph: iter(()))


ALL_ON, BYTE_LIMITS = "all on", "byte limits of plans"
TRACE, RUNTIME, LOWER, FUSE = (f"gpipe_fast/{name}/" for name in ("trace", "runtime", "lower", "fuse"))
ON_CPUS = [
    Mechanism(
        "templates and derived programs",
        [
            *(f"{TRACE}{name}.py" for name in ("symbolic", "symbols", "formulas")),
            f"{LOWER}program_template.py",
            f"{RUNTIME}shape_families.py",
            "tests/**/*template*.py",
            "tests/**/*formulas*.py",
            "tests/**/*symbolic*.py",
        ],
        _environment("GPIPE_FAST_DISABLE", "templates"),
    ),
    Mechanism(
        "equal layers and stages traced once",
        [f"{RUNTIME}equal_layers.py", f"{TRACE}join.py", "tests/**/*equal_layers*.py"],
        _environment("GPIPE_FAST_DISABLE", "equal-layers"),
    ),
    Mechanism(
        "collector paused in traces", [f"{TRACE}garbage.py", "tests/**/test_garbage.py"], _collect_in_traces
    ),
    Mechanism(
        "trials of products",
        [f"{LOWER}bitwise_addmm.py", "tests/**/*bitwise_addmm*.py"],
        lambda: _replace("gpipe_fast.lower.accumulation", "addmm_is_bitwise_equal", lambda a, b: False),
    ),
    Mechanism(
        BYTE_LIMITS,
        [f"{RUNTIME}{name}.py" for name in ("eviction", "cache")] + ["tests/**/*eviction*.py"],
        _environment("GPIPE_FAST_PLANS_MIB", "1000000"),
    ),
]
ON_GPUS = [
    Mechanism(
        "losses matched node by node", [f"{FUSE}losses.py", "tests/**/test_fused_losses.py"], _without_losses
    ),
    Mechanism(
        "regions",
        [f"{FUSE}regions/*.py", "tests/**/regions/*.py"],
        lambda: _replace("gpipe_fast.fuse.fuse", "regions_of", lambda *arguments, **others: []),
    ),
    Mechanism(
        "casts of parameters once a run",
        [f"{FUSE}casts.py", "csrc/program/parameter_casts.*", "tests/**/*casts*.py"],
        lambda: _replace("tools.fusion", "hoist_parameter_casts", lambda joint: joint),
    ),
]
CPU_FIGURES = {
    "first": "first call of a GPT of 12 blocks, s",
    "images": "first call of a ResNet with 4 bottlenecks, s",
    "length": "call with a further length, s",
    "gpt": "step of the GPT, ms",
    "small": "step of few and small operators, ms",
    "kept": f"memory kept after {len(LENGTHS) + len(FURTHER)} lengths, MiB",
}
GPU_STAGES = ("GPT", "GPT-2", "Llama", "head")
NOT_SHOWN = "not shown on a GPU"
HOW = "without it / with it: median of pairs [95% interval]"


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(name: str) -> dict[str, float]:
    """Returns the figures of this process, in which a mechanism is off, by the keys of `CPU_FIGURES`."""
    from bench.models.gpt import gpt
    from bench.models.mlp import mlp
    from bench.models.resnet import resnet
    from gpipe_fast import GPipe

    def pipeline(layers: nn.Sequential) -> GPipe:
        half = len(layers) // 2
        model = GPipe(layers, [half, len(layers) - half], devices=["cpu"] * 2, chunks=4)
        model.threads_per_stage = 1
        return model

    def step(model: GPipe, x: Tensor) -> None:
        model(x).sum().backward()

    def milliseconds(model: GPipe, x: Tensor) -> float:
        return median(_seconds(lambda: step(model, x)) for _ in range(STEPS)) * 1e3

    torch.manual_seed(0)
    tokens = [torch.zeros(8, length, dtype=torch.int64) for length in LENGTHS]
    blocks = pipeline(gpt(12, 64, 4, vocab=256))
    calls = [_seconds(lambda x=x: step(blocks, x)) for x in tokens]  # type: ignore[misc]
    found = {"first": calls[0], "length": median(calls[3:]), "gpt": milliseconds(blocks, tokens[0])}
    images = pipeline(resnet((1, 1, 1, 1), num_classes=10, width=16))
    found["images"] = _seconds(lambda: step(images, torch.randn(8, 3, 32, 32)))
    small, x = pipeline(nn.Sequential(*(layer for _ in range(4) for layer in mlp(64)))), torch.randn(16, 64)
    step(small, x)
    found["small"] = milliseconds(small, x)
    # Last: further lengths make what follows them faster, or slower if memory is left in fragments.
    if name in (ALL_ON, BYTE_LIMITS):
        before = resident.present()
        for length in FURTHER:
            step(blocks, torch.zeros(8, length, dtype=torch.int64))
        found["kept"] = resident.present() - before
    return found


def count() -> dict[str, float]:
    """Returns the bytes that stages on a GPU move, in a process with the fake CUDA runtime."""
    from tools import fusion
    from tools.stages import LARGE

    return {
        f"{row.stage}, {row.precision}" + ", forward" * (row.program == "forward"): row.after.moved
        for row in fusion.rows(LARGE, GPU_STAGES, fusion.fused)
    }


def lines(mechanism: Mechanism) -> tuple[int, int]:
    """Returns the lines of code of a mechanism's sources and of its tests."""
    counter, found = runpy.run_path(str(ROOT / ".ci" / "count_lines.py")), [0, 0]
    for pattern in mechanism.files:
        for path in ROOT.glob(pattern):
            kind = counter["python_lines" if path.suffix == ".py" else "cpp_lines"]
            found[pattern.startswith("tests")] += kind(path.read_text())
    return found[0], found[1]


def cpu_rows(rounds: int) -> list[list[object]]:
    """Returns a row for each mechanism: its lines, and each figure without it divided by the one with it."""
    runs: dict[str, list[dict[str, float]]] = {ALL_ON: [], **{each.name: [] for each in ON_CPUS}}
    for _ in shown(range(rounds), "rounds of processes"):
        for name, found in runs.items():
            found.append(process.call("tools.ledger:without", name, "measure"))

    def ratio(name: str, key: str) -> str:
        if key not in runs[name][0]:
            return "-"
        return str(Ratio.of([run[key] for run in runs[name]], [run[key] for run in runs[ALL_ON]]))

    absolute = [f"{median(run[key] for run in runs[ALL_ON]):.2f}" for key in CPU_FIGURES]
    rows = [[each.name, *lines(each), *(ratio(each.name, key) for key in CPU_FIGURES)] for each in ON_CPUS]
    return [[ALL_ON, "", "", *absolute], *rows]


def shown_on_gpus() -> Iterator[list[object]]:
    """Yields a row for each model that was measured on a GPU with and without all fused kernels."""
    for path in sorted(RESULTS.glob("nvidia-*.md")):
        for part in path.read_text().split("\n## ")[1:]:
            found = ([cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines())
            rows = {line[0]: line[1:] for line in found if line}
            with_all, without = rows.get("gpipe_fast, captured"), rows.get("gpipe_fast, no fused kernels")
            if with_all and without:
                speedup, peaks = rows["candidate"].index("speedup of gpipe_fast"), [without[3], with_all[3]]
                is_known = all(peak.isdigit() and int(peak) for peak in peaks)
                memory = f"{int(peaks[0]) / int(peaks[1]):.2f}" if is_known else NOT_SHOWN
                model = part.partition("\n")[0]
                yield [f"all fused kernels: {model} (`{path.name}`)", "", "", without[speedup], memory]


def gpu_rows(runtime: Path) -> list[list[object]]:
    """Returns a row for each part of fusion: its lines, what users see, and the bytes that it removes."""
    from tools import fake_cuda

    rows = [[*row, ""] for row in shown_on_gpus()]
    with_all: dict[str, float] = fake_cuda.call(runtime, "tools.ledger:without", ALL_ON, "count")
    for each in shown(ON_GPUS, "parts of fusion"):
        found = fake_cuda.call(runtime, "tools.ledger:without", each.name, "count")
        changes = {stage: found[stage] / moved for stage, moved in with_all.items()}
        most = max(changes, key=lambda stage: changes[stage])
        rows.append([each.name, *lines(each), NOT_SHOWN, NOT_SHOWN, f"{changes[most]:.2f} ({most})"])
    return rows


def without(name: str, kind: str) -> dict[str, Any]:
    """Measures or counts in this process without the mechanism of a name."""
    for each in (*ON_CPUS, *ON_GPUS):
        if each.name == name:
            each.off()
    return measure(name) if kind == "measure" else count()


def main() -> None:
    from tools import fake_cuda

    rows = cpu_rows(ROUNDS)
    tables: list[Table] = []
    if libraries := fake_cuda.libraries("ledger, on GPUs"):
        headers = "part | lines | of tests | step time | peak memory | most bytes of a stage"
        note = (
            "Without it / with it. Step time and peak memory are what users see, and decide. Bytes of a "
            f"forward or recomputing backward are only counted, as in fusion.md, at commit {commit()}."
        )
        tables = [Table("On GPUs", headers, gpu_rows(libraries[0]), note)]
    report(globals(), ["mechanism", "lines", "of tests", *CPU_FIGURES.values()], rows, tables)
