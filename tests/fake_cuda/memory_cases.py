"""Memory that steps need, predicted and counted by PyTorch's allocator; run by test_memory.py.

`memory_cases.py OPERATORS CASE MODEL WORD...`: runs a case on fake devices, one for each stage, and prints
what it returns. No kernel is fused. Graphs are captured only if a memory limit fails to turn them off.
"""

from __future__ import annotations

import gc
import random
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models.gpt import blocks
from bench.models.resnet import resnet
from bench.models.unet import unet
from gpipe_fast import GPipe
from gpipe_fast.reports.memory_report import MemoryReport
from tests.internals import inject_delays

MAX_DELAY_US = 20_000


def gpt() -> nn.Sequential:
    return nn.Sequential(*blocks(8, 64))


def dropped() -> nn.Sequential:
    layers = [(block, nn.Dropout(0.1)) for block in blocks(4, 64)]
    return nn.Sequential(*(layer for pair in layers for layer in pair))


def uneven() -> nn.Sequential:
    return nn.Sequential(*blocks(4, 32), nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 32), *blocks(1, 32))


MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "gpt": (gpt, (32, 64)),
    "dropout": (dropped, (32, 64)),
    "uneven": (uneven, (32, 32)),
    "unet": (partial(unet, depth=3, num_convs=1, base_channels=8), (3, 32, 32)),
    "resnet": (partial(resnet, (1, 1, 1, 1), num_classes=10, width=32), (3, 64, 64)),
}


def balance_of(num_layers: int, num_stages: int) -> list[int]:
    ends = [num_layers * (stage + 1) // num_stages for stage in range(num_stages)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def made(name: str, num_stages: int, num_microbatches: int, **options: object) -> tuple[GPipe, Tensor]:
    """Returns a pipeline with one stage on each device, and a mini-batch of two samples per micro-batch."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    layers = make()
    options = {"capture": False, "fuse": False} | options
    pipe = GPipe(
        layers,
        balance_of(len(layers), num_stages),
        devices=[f"cuda:{stage}" for stage in range(num_stages)],
        chunks=num_microbatches,
        **options,
    )
    return pipe, torch.randn(2 * num_microbatches, *shape, device=pipe.devices[0])


def step(pipe: GPipe, x: Tensor, schedule: str) -> None:
    pipe.zero_grad(set_to_none=True)
    if schedule:
        pipe.schedule = schedule
        target = torch.zeros(len(x), device=pipe.devices[-1])
        pipe.step(x, target=target, loss_fn=loss_of, normalizer=1)
    else:
        y = pipe(x)
        y.backward(y.detach())


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y.flatten(1).sum(1), target, reduction="sum")


def counted(pipe: GPipe, x: Tensor, schedule: str, before: list[int]) -> list[int]:
    """Returns the peak of each device in a third step, without the mini-batch."""
    for _ in range(2):
        step(pipe, x, schedule)
    return peaks(pipe, x, schedule, before)


def peaks(pipe: GPipe, x: Tensor, schedule: str, before: list[int]) -> list[int]:
    """Returns the peak of each device in a step, without the mini-batch."""
    pipe.zero_grad(set_to_none=True)
    for stage in range(len(pipe.balance)):
        torch.cuda.reset_peak_memory_stats(stage)
    step(pipe, x, schedule)
    given = [x.nbytes, *[0] * (len(pipe.balance) - 1)]
    return [allocated(i, "peak") - b - g for i, (b, g) in enumerate(zip(before, given, strict=True))]


def allocated(stage: int, when: str) -> int:
    """Returns the bytes that are allocated on a device, with what the allocator rounds up to."""
    found: int = torch.cuda.memory_stats(stage).get(f"allocated_bytes.all.{when}", 0)
    return found


def empty(num_stages: int) -> list[int]:
    """Returns what is allocated on each device, after a collection."""
    gc.collect()
    torch.cuda.empty_cache()
    return [allocated(stage, "current") for stage in range(num_stages)]


def predicted(name: str, schedule: str, stages: str, microbatches: str, settings: str) -> list[str]:
    """Returns a line for each setting: its name, and for each device the least and the most bytes that are
    predicted, for tensors that arrive late or early, and those that are counted.

    Numbers of stages and micro-batches, and checkpoint settings, are given with commas.
    """
    lines = []
    for num_stages in map(int, stages.split(",")):
        for num_microbatches in map(int, microbatches.split(",")):
            for setting in settings.split(","):
                checkpoint = float(setting) if setting[0] in "01" else setting
                before = empty(num_stages)
                pipe, x = made(name, num_stages, num_microbatches, checkpoint=checkpoint)
                found = counted(pipe, x, schedule, before)
                report = prediction(pipe, x, schedule)
                if isinstance(checkpoint, str):  # what a share saves depends on times
                    absent = prediction(pipe, x, schedule, device="cuda")
                    # What operators allocate and free is not known without the device.
                    for here, there in zip(report.stages, absent.stages, strict=True):
                        assert there.total <= here.total <= 1.01 * there.total, (absent, report)  # type: ignore[union-attr]
                lines.append(f"{num_stages} {num_microbatches} {checkpoint}: {triples(report, found)}")
                del pipe, x
    return lines


def prediction(pipe: GPipe, x: Tensor, schedule: str, **options: Any) -> MemoryReport:
    """Returns the report on a step, or on a call if there is no schedule."""
    if schedule:
        target = torch.zeros(len(x), device="meta")
        options |= {"target": target, "loss_fn": loss_of, "normalizer": 1}
    return pipe.memory(x.to("meta"), **options)


def triples(report: MemoryReport, found: list[int]) -> str:
    """Returns for each device what is predicted, the least and the most, and what is counted."""
    pairs = zip(report.stages, found, strict=True)
    return ", ".join(f"{own.total - own.waiting} {own.total} {size}" for own, size in pairs)  # type: ignore[union-attr]


def within(name: str, schedule: str, seed: str, count: str) -> list[str]:
    """Trains within random budgets. Returns a line for each: the limit, and the most bytes that a device
    takes in a step, or in one whose stages are delayed at random.
    """
    draw = random.Random(seed)
    lines = []
    for _ in range(int(count)):
        num_stages, num_microbatches = draw.choice([(1, 4), (2, 4), (2, 8), (4, 8)])
        ends = []
        for checkpoint in ("always", "never"):
            pipe, x = made(name, num_stages, num_microbatches, checkpoint=checkpoint)
            ends.append(max(own.total for own in pipe.memory(x).stages))  # type: ignore[union-attr]
            del pipe, x
        limit = int(draw.uniform(1.1 * ends[0], 1.1 * max(ends)))
        before = empty(num_stages)
        pipe, x = made(name, num_stages, num_microbatches, memory=limit, capture=True)
        try:
            found = counted(pipe, x, schedule, before)
        except ValueError as error:
            lines.append(f"{limit} refused: {error}")
            continue
        inject_delays(pipe, draw.randrange(1 << 30), MAX_DELAY_US)
        lines.append(f"{limit} {max(*found, *peaks(pipe, x, schedule, before))}")
        del pipe, x
    return lines


def main() -> None:
    _, operators, case, *words = sys.argv
    torch.ops.load_library(operators)
    warnings.simplefilter("ignore")
    # The operators of the fake devices have no fused attention.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    cases: dict[str, Callable[..., list[str]]] = {
        "predicted": predicted,
        "within": within,
    }
    for line in cases[case](*words):
        print(line, flush=True)


if __name__ == "__main__":
    main()
