"""Whole training steps of a GPT with a large vocabulary: peak memory of activations, and time.

A GPT of {BLOCKS} blocks of width {WIDTH} with {VOCABULARY:,} classes; {BATCH} x {LENGTH} tokens in {CHUNKS}
micro-batches, two stages on the CPU with one thread each, checkpoint='{MODE}'; gradients are kept from step
to step. The peak is that of resident memory during a step, above what is resident before it: the largest of
{STEPS} steps after two others. {PROCESSES} process for each. What is kept between steps, such as scratch
memory and programs, is what is resident then, above the least of all.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import process, resident
from bench.measure import report
from bench.models.gpt import gpt
from bench.peers import has_torchgpipe
from gpipe_fast import GPipe

VOCABULARY, WIDTH, BLOCKS, BATCH, LENGTH, CHUNKS = 32_000, 256, 4, 16, 256, 8
BALANCE = [3, 4]
STEPS, PROCESSES = 2, 1
MODE = "except_last"


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")


def _pipe(layers: nn.Sequential, schedule: str) -> Any:
    pipe = GPipe(
        layers,
        BALANCE,
        devices=["cpu"] * 2,
        chunks=CHUNKS,
        checkpoint=MODE,
        schedule=schedule,
        backend="aten",
    )
    pipe.threads_per_stage = 1
    return pipe


def _two_lines(pipe: Any) -> Callable[[Tensor], Any]:
    return lambda tokens: (_loss(pipe(tokens), tokens) / tokens.numel()).backward()


def _step(pipe: Any) -> Callable[[Tensor], Any]:
    return lambda tokens: pipe.step(tokens, target=tokens, loss_fn=_loss, normalizer=tokens.numel())


def _torchgpipe(layers: nn.Sequential) -> Callable[[Tensor], Any]:
    import torchgpipe  # type: ignore[import-untyped, unused-ignore]

    pipe = torchgpipe.GPipe(layers, BALANCE, devices=["cpu"] * 2, chunks=CHUNKS, checkpoint=MODE)
    return _two_lines(pipe)


def _plain_loop(layers: nn.Sequential) -> Callable[[Tensor], Any]:
    def step(tokens: Tensor) -> None:
        for part in tokens.chunk(CHUNKS):
            (_loss(layers(part), part) / tokens.numel()).backward()

    return step


CANDIDATES: dict[str, Callable[[nn.Sequential], Callable[[Tensor], Any]]] = {
    "loss_fn(model(x), y).backward()": lambda layers: _two_lines(_pipe(layers, "gpipe")),
    "model.step, schedule='gpipe'": lambda layers: _step(_pipe(layers, "gpipe")),
    "model.step, schedule='1f1b'": lambda layers: _step(_pipe(layers, "1f1b")),
    "torchgpipe": _torchgpipe,
    "plain loop, a backward after each micro-batch": _plain_loop,
}


def measure(name: str) -> dict[str, float]:
    """Returns the peak (MiB) of a step's activations, above what is resident between steps, and its time."""
    torch.manual_seed(0)
    layers = gpt(BLOCKS, WIDTH, 8, VOCABULARY, LENGTH)
    step, tokens = CANDIDATES[name](layers), torch.randint(VOCABULARY, (BATCH, LENGTH))
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
    names = [name for name in CANDIDATES if name != "torchgpipe" or has_torchgpipe()]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(PROCESSES):
        for name in names:
            runs[name].append(process.call("bench.compare.training_step:measure", name))

    def value(name: str, key: str) -> float:
        return median(each[key] for each in runs[name])

    own, least = value(names[0], "peak"), min(value(name, "resident") for name in names)
    rows = []
    for name in names:
        peak, kept = value(name, "peak"), value(name, "resident") - least
        rows.append([name, round(peak), peak / own, round(kept), f"{value(name, 'seconds'):.2f}"])
    report(
        globals(),
        ["step", "peak of a step, MiB", "relative to the first", "kept between steps, MiB", "seconds"],
        rows,
    )
