"""Whole training steps of a GPT with a large vocabulary: peak memory of activations, and time.

A GPT of {BLOCKS} blocks of width {WIDTH} with {VOCABULARY:,} classes; {BATCH} x {LENGTH} tokens in {CHUNKS}
micro-batches, two stages on the CPU with one thread each, checkpoint='{MODE}'; gradients are kept from step
to step. The peak is that of resident memory during a step, above what is resident before it: the largest of
{STEPS} steps after two others, in a process for each. What is kept between steps, such as scratch memory and
programs, is what is resident then, above the least of all.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import process, resident
from bench.measure import report
from bench.models.gpt import gpt
from bench.peers import has_torchgpipe
from gpipe_fast import GPipe

VOCABULARY, WIDTH, BLOCKS, BATCH, LENGTH, CHUNKS = 32_000, 256, 4, 16, 128, 8
STEPS, MODE = 2, "except_last"
TWO_LINES, STEP, STEP_1F1B, TORCHGPIPE, LOOP = (
    "loss_fn(model(x), y).backward()",
    "model.step, schedule='gpipe'",
    "model.step, schedule='1f1b'",
    "torchgpipe",
    "plain loop, a backward after each micro-batch",
)


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")


def build(name: str) -> Callable[[Tensor], Any]:
    """Returns a step of a candidate."""
    layers = gpt(BLOCKS, WIDTH, 8, VOCABULARY, LENGTH)
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "chunks": CHUNKS, "checkpoint": MODE}
    if name == LOOP:
        return lambda tokens: [
            (_loss(layers(x), x) / tokens.numel()).backward() for x in tokens.chunk(CHUNKS)
        ]
    model: Any
    if name == TORCHGPIPE:
        import torchgpipe  # type: ignore[import-untyped, unused-ignore]

        model = torchgpipe.GPipe(layers, [3, 4], **options)
    else:
        schedule = "1f1b" if name == STEP_1F1B else "gpipe"
        model = GPipe(layers, [3, 4], schedule=schedule, backend="aten", **options)
        model.threads_per_stage = 1
    if name in (STEP, STEP_1F1B):
        return lambda tokens: model.step(tokens, target=tokens, loss_fn=_loss, normalizer=tokens.numel())
    return lambda tokens: (_loss(model(tokens), tokens) / tokens.numel()).backward()


def measure(name: str) -> dict[str, float]:
    """Returns the peak (MiB) of a step's activations, above what is resident between steps, and its time."""
    torch.manual_seed(0)
    step, tokens = build(name), torch.randint(VOCABULARY, (BATCH, LENGTH))
    for _ in range(2):  # makes programs, gradients and scratch memory
        step(tokens)
    peaks, times = [], []
    for _ in range(STEPS):
        before = resident.present()
        resident.reset_peak()
        begin = perf_counter()
        step(tokens)
        times.append(perf_counter() - begin)
        peaks.append(resident.peak() - before)
    return {"peak": max(peaks), "seconds": median(times), "resident": before}


def main() -> None:
    names = [TWO_LINES, STEP, STEP_1F1B, *([TORCHGPIPE] if has_torchgpipe() else []), LOOP]
    found = {name: process.call("bench.compare.training_step:measure", name) for name in names}
    least = min(each["resident"] for each in found.values())
    report(
        globals(),
        ["step", "peak of a step, MiB", "relative to the first", "kept between steps, MiB", "seconds"],
        [
            [
                name,
                round(each["peak"]),
                each["peak"] / found[TWO_LINES]["peak"],
                round(each["resident"] - least),
                each["seconds"],
            ]
            for name, each in found.items()
        ],
    )
