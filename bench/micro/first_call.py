"""First calls of three models, and calls with further sequence lengths.

Two stages on the CPU, one thread each; each model in a process of its own. A call includes the step itself.
Processor time is that of all threads.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import process
from bench.comparison import Outcome, Series
from bench.measure import report

CHUNKS = 4
LENGTHS = (32, 48, 40, 33, 41, 36, 45, 38)


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
ONE_LENGTH: dict[str, Sequence[int]] = {"first call": [0], "third call": [2]}
CALLS = {
    "densenet": ONE_LENGTH,
    "gpt2": ONE_LENGTH,
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


def _outcomes(model: str) -> dict[str, Outcome]:
    found = process.call("bench.micro.first_call:calls", model)
    return {what: Outcome(times=[1e6 * found[i][1] for i in steps]) for what, steps in CALLS[model].items()}


COMPARISONS = [
    Series(
        f"first calls of {model}", list(CALLS[model]), partial(_outcomes, model), sampled=model == "lengths"
    )
    for model in MODELS
]


def main() -> None:
    rows: list[list[object]] = []
    for model, make in MODELS.items():
        found = process.call("bench.micro.first_call:calls", model)
        for what, steps in CALLS[model].items():
            seconds = (median(found[step][column] for step in steps) for column in range(3))
            rows.append([str(make.__doc__).rstrip("."), what, *seconds])
    report(globals(), ["model", "call", "forward, s", "forward and backward, s", "processor, s"], rows)
