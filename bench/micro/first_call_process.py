"""Runs the first calls of one model, and prints their times as JSON.

It uses only the public interface, because it also runs with older versions of gpipe_fast.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNKS = 4
LENGTHS = (32, 48, 40, 33, 41, 36, 45, 38, 43, 35, 46)


@dataclass(frozen=True)
class Case:
    """A model, its balance, and the inputs and targets of its calls."""

    layers: nn.Sequential
    balance: Sequence[int]
    batches: Sequence[tuple[Tensor, Tensor]]


def _halves(layers: nn.Sequential) -> list[int]:
    return [len(layers) // 2, len(layers) - len(layers) // 2]


def densenet() -> Case:
    """Returns DenseNet-121 for images of 64 pixels."""
    import torchvision  # type: ignore[import-untyped, unused-ignore]

    model = torchvision.models.densenet121(num_classes=10)
    glue = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    layers = nn.Sequential(*model.features, *glue, model.classifier)
    images, targets = torch.randn(8, 3, 64, 64), torch.zeros(8, dtype=torch.int64)
    return Case(layers, _halves(layers), [(images, targets)] * 3)


def gpt2() -> Case:
    """Returns GPT-2 small, of 12 blocks, for 64 tokens."""
    import transformers

    make: Any = transformers.GPT2LMHeadModel
    example: Any = importlib.import_module("examples.transformers_gpt2.__main__")
    layers = example.gpt2_layers(make(transformers.GPT2Config()))
    tokens = torch.zeros(4, 64, dtype=torch.int64)
    return Case(layers, _halves(layers), [(tokens, tokens)] * 3)


def lengths() -> Case:
    """Returns a GPT of 12 blocks of width 64, for tokens of different lengths."""
    from examples.gpt.__main__ import gpt

    layers = gpt(64, 12, 4, max(LENGTHS))
    tokens = [torch.zeros(8, length, dtype=torch.int64) for length in LENGTHS]
    return Case(layers, _halves(layers), [(t, t) for t in tokens])


MODELS = {"densenet": densenet, "gpt2": gpt2, "lengths": lengths}


def step_of_optimizer() -> None:
    """Runs the first step of an optimizer, for which PyTorch imports its compiler."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.sum().backward()
    torch.optim.AdamW([parameter]).step()


def main() -> None:
    """Times the calls of the model that is the first argument; "import" only times the import.

    With --after-optimizer, an optimizer has run before the import.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if "--after-optimizer" in sys.argv:
        step_of_optimizer()
    begin = time.perf_counter()
    from gpipe_fast import GPipe

    imported = time.perf_counter() - begin
    if sys.argv[1] == "import":
        print(json.dumps({"import": imported}))
        return
    torch.manual_seed(0)
    case = MODELS[sys.argv[1]]()
    model = GPipe(case.layers, case.balance, devices=["cpu"] * 2, chunks=CHUNKS)
    steps = []
    for batch, targets in case.batches:
        begin, processor = time.perf_counter(), time.process_time()
        outputs = model(batch)
        forward = time.perf_counter() - begin
        F.cross_entropy(outputs.flatten(0, -2), targets.flatten()).backward()
        steps.append(
            {
                "forward": forward,
                "step": time.perf_counter() - begin,
                "processor": time.process_time() - processor,
            }
        )
    print(json.dumps({"steps": steps}))


if __name__ == "__main__":
    main()
