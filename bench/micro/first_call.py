"""First calls of three models, calls with further sequence lengths, and the start of a process.

Two stages on the CPU, one thread each; the medians of {PROCESSES} processes, which run by turns. A call
includes the step itself. Processor time is that of all threads.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import process
from bench.measure import report
from bench.progress import shown

CHUNKS, PROCESSES = 4, 3
LENGTHS = (32, 48, 40, 33, 41, 36, 45, 38, 43, 35, 46)
# What a process has done before it imports gpipe_fast.
IMPORTS = {"torch": False, "torch and an optimizer's first step": True}


@dataclass(frozen=True)
class Case:
    """A model, and the inputs and targets of its calls."""

    layers: nn.Sequential
    batches: Sequence[tuple[Tensor, Tensor]]


def densenet() -> Case:
    """DenseNet-121, 8 images of 64 pixels."""
    import torchvision  # type: ignore[import-untyped, unused-ignore]

    model = torchvision.models.densenet121(num_classes=10)
    glue = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    images, targets = torch.randn(8, 3, 64, 64), torch.zeros(8, dtype=torch.int64)
    return Case(nn.Sequential(*model.features, *glue, model.classifier), [(images, targets)] * 3)


def gpt2() -> Case:
    """GPT-2 small, 4 x 64 tokens."""
    import transformers

    make: Any = transformers.GPT2LMHeadModel
    example: Any = importlib.import_module("examples.transformers_gpt2.__main__")
    tokens = torch.zeros(4, 64, dtype=torch.int64)
    return Case(example.gpt2_layers(make(transformers.GPT2Config())), [(tokens, tokens)] * 3)


def lengths() -> Case:
    """GPT of 12 blocks of width 64."""
    from examples.gpt.__main__ import gpt

    tokens = [torch.zeros(8, length, dtype=torch.int64) for length in LENGTHS]
    return Case(gpt(64, 12, 4, max(LENGTHS)), [(t, t) for t in tokens])


MODELS = {"densenet": densenet, "gpt2": gpt2, "lengths": lengths}
# The rows of a model, and the calls of which a row has the median.
CALLS: dict[str, dict[str, Sequence[int]]] = {
    "densenet": {"first call": [0], "third call": [2]},
    "gpt2": {"first call": [0], "third call": [2]},
    "lengths": {
        "first length": [0],
        "second length": [1],
        "third length": [2],
        "further lengths": range(3, len(LENGTHS)),
    },
}


def calls(model: str) -> list[list[float]]:
    """Returns, for each call in this process, the seconds of its forward, of the step, and of processors."""
    from gpipe_fast import GPipe

    warnings.simplefilter("ignore")
    case = MODELS[model]()
    half = len(case.layers) // 2
    pipe = GPipe(case.layers, [half, len(case.layers) - half], devices=["cpu"] * 2, chunks=CHUNKS)
    found = []
    for batch, targets in case.batches:
        begin, processor = time.perf_counter(), time.process_time()
        outputs = pipe(batch)
        forward = time.perf_counter() - begin
        F.cross_entropy(outputs.flatten(0, -2), targets.flatten()).backward()
        found.append([forward, time.perf_counter() - begin, time.process_time() - processor])
    return found


def import_seconds(after_optimizer: bool) -> float:
    """Returns how long the import of gpipe_fast takes in this process."""
    if after_optimizer:  # for its first step, PyTorch imports its compiler
        parameter = nn.Parameter(torch.zeros(1))
        parameter.sum().backward()
        torch.optim.AdamW([parameter]).step()
    begin = time.perf_counter()
    importlib.import_module("gpipe_fast")
    return time.perf_counter() - begin


def rows_of(model: str, runs: Sequence[list[list[float]]]) -> list[list[object]]:
    """Returns the rows of one model."""
    title = str(MODELS[model].__doc__).rstrip(".")
    found: list[list[object]] = []
    for what, steps in CALLS[model].items():
        values = (median(median(run[step][column] for run in runs) for step in steps) for column in range(3))
        found.append([title, what, *(f"{value:.2f}" for value in values)])
    return found


def main() -> None:
    runs: dict[str, list[list[list[float]]]] = {model: [] for model in MODELS}
    imports: dict[str, list[float]] = {after: [] for after in IMPORTS}
    for _ in shown(range(PROCESSES), "rounds of processes"):
        for model, found in runs.items():
            found.append(process.call("bench.micro.first_call:calls", model))
        for after, seconds in imports.items():
            seconds.append(process.call("bench.micro.first_call:import_seconds", IMPORTS[after]))
    rows = [row for model, found in runs.items() for row in rows_of(model, found)]
    rows += [["", f"import gpipe_fast, after {a}", "", f"{median(s):.2f}", ""] for a, s in imports.items()]
    report(globals(), ["model", "call", "forward, s", "forward and backward, s", "processor, s"], rows)
