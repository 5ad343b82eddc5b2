"""Training on sequences whose length changes from step to step, compared with a fixed length.

A GPT of {BLOCKS} blocks of width {WIDTH}, trained on {BATCH} sequences of equal length per step, in {CHUNKS}
micro-batches. Two stages with one thread each, default checkpointing; the plain loop has one thread. Making a
plan means tracing or instantiating a template, lowering and building; a further plan (median) is one after
the first {_NUM_FIRST}, which trace and lower a template. In every step, loss and gradients were bitwise equal
to the plain loop's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.measure import report
from bench.peers import looped
from examples.gpt.__main__ import gpt
from gpipe_fast import GPipe

STEPS, LONGEST, REPEATED_LENGTHS = 300, 512, range(32, 513, 32)
CHUNKS, BATCH, WIDTH, BLOCKS = 4, 8, 128, 4
# The plans of the first lengths: two traces, the template, and its programs for other decisions.
_NUM_FIRST = 6


@contextmanager
def _timed(owner: Any, name: str) -> Iterator[list[float]]:
    """Collects the duration (s) of every call of a method inside the block."""
    method: Callable[..., Any] = getattr(owner, name)
    durations: list[float] = []

    def timed(*arguments: object) -> Any:
        start = time.perf_counter()
        try:
            return method(*arguments)
        finally:
            durations.append(time.perf_counter() - start)

    setattr(owner, name, timed)
    try:
        yield durations
    finally:
        delattr(owner, name)


def train(name: str, lengths: Sequence[int], width: int = WIDTH) -> list[object]:
    """Returns one row: steps on sequences of the given lengths, each step compared with the plain loop."""
    generator = torch.Generator().manual_seed(0)
    plain = gpt(width, layers=BLOCKS, heads=4, length=max(lengths))
    pipe = GPipe(deepcopy(plain), [3, 3], devices=["cpu"] * 2, chunks=CHUNKS)
    pipe.threads_per_stage = 1
    seconds = loop_seconds = 0.0
    with _timed(pipe._planner, "_make") as making:
        for length in lengths:
            text = torch.randint(256, (BATCH, length + 1), generator=generator)
            start = time.perf_counter()
            loss = _step(pipe, pipe, text)
            middle = time.perf_counter()
            expected = _step(plain, looped(plain, CHUNKS), text)
            seconds, loop_seconds = seconds + middle - start, loop_seconds + time.perf_counter() - middle
            assert torch.equal(loss, expected), f"loss at length {length}"
            for (weight, ours), wanted in zip(pipe.named_parameters(), plain.parameters(), strict=True):
                assert ours.grad is not None
                assert wanted.grad is not None
                assert torch.equal(ours.grad, wanted.grad), f"gradient of {weight} at length {length}"
    compiler = pipe._planner._compiler
    return [
        name,
        len(lengths),
        len(set(lengths)),
        sum(lengths) / len(lengths),
        compiler.num_traces,
        compiler.num_instantiated,
        seconds,
        sum(making),
        1e3 * median(making[_NUM_FIRST:]) if len(making) > _NUM_FIRST else "-",
        loop_seconds,
    ]


def _step(model: nn.Module, forward: Callable[[Tensor], Tensor], text: Tensor) -> Tensor:
    model.zero_grad()
    logits = forward(text[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def distinct_lengths(steps: int, longest: int) -> list[int]:
    """Returns `steps` distinct lengths up to `longest`, in random order."""
    order = torch.randperm(longest, generator=torch.Generator().manual_seed(0))
    return [int(length) + 1 for length in order[:steps]]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    changing = distinct_lengths(STEPS, LONGEST)
    mean = round(sum(changing) / STEPS)
    few = [REPEATED_LENGTHS[length % len(REPEATED_LENGTHS)] for length in changing]
    report(
        globals(),
        "lengths | steps | distinct | mean | traces | instantiated from templates | "
        "seconds | seconds making plans | milliseconds per further plan | seconds of the "
        "plain loop",
        [
            train(f"1 to {LONGEST}, all distinct", changing),
            train(f"{len(REPEATED_LENGTHS)} repeated lengths", few),
            train("one length, the mean of the first row", [mean] * STEPS),
        ],
    )
