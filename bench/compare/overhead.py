"""Overhead of a step beyond its operators: the stages are so small that little else remains.

{STAGES} stages of 2 x (Linear({WIDTH}, {WIDTH}), ReLU), {CHUNKS} micro-batches, batch {BATCH}; forward and
backward from a given output gradient, starting without gradients. All candidates run alternately in one
process under OMP_NUM_THREADS=1. Gradients are compared with the plain loop's: ours must be equal, others may
differ by {TOLERANCE:.0e} of the largest element of their tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from bench import process
from bench.comparison import HEADERS, Comparison, Opened, rows
from bench.measure import Table, report
from bench.models.mlp import mlp
from bench.peers import Step, checkpointed, has_torchgpipe, looped
from gpipe_fast import GPipe

STAGES, CHUNKS, BATCH, WIDTH = 4, 8, 64, 64
OURS, TORCHGPIPE = "gpipe_fast, K = ", f"torchgpipe, K = {STAGES}, "
LOOP, WHOLE, CHECKPOINTED = "plain loop", "plain, whole mini-batch", "plain loop, checkpoint"


def names(mode: str) -> list[str]:
    """Returns the names of the candidates; the plain loop is always one, because all must equal it."""
    theirs = [TORCHGPIPE + mode] if has_torchgpipe() else []
    ours = [f"{OURS}{num_stages}, {mode}" for num_stages in (STAGES, 1)]
    return [*ours, *theirs, LOOP, WHOLE if mode == "never" else CHECKPOINTED]


def build(name: str, mode: str) -> Step:
    """Returns a candidate; each has its own model, and all models have equal parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(STAGES) for layer in mlp(WIDTH)))
    input, gradient = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    stages = 1 if name.startswith(f"{OURS}1") else STAGES
    size = len(model) // stages
    options: Any = {"devices": ["cpu"] * stages, "chunks": CHUNKS, "checkpoint": mode}
    forward: Callable[..., Any] = model
    if name.startswith(OURS):
        forward = GPipe(model, [size] * stages, **options)
    elif name.startswith(TORCHGPIPE):
        import torchgpipe

        forward = torchgpipe.GPipe(model, [size] * stages, **options)
    elif name == LOOP:
        forward = looped(model, CHUNKS)
    elif name == CHECKPOINTED:
        forward = looped(checkpointed([model[i : i + size] for i in range(0, len(model), size)]), CHUNKS)
    return Step(model.parameters(), forward, input, gradient)


def _opened(mode: str, stack: ExitStack) -> Opened:
    found = {name: build(name, mode) for name in names(mode)}
    found[LOOP]()
    return found, [gradient.clone() for gradient in found[LOOP].gradients()]


COMPARISONS = [
    Comparison(f"overhead, {mode}", names(mode), partial(_opened, mode), rounds=40, calls=5, sampled=True)
    for mode in ("never", "always")
]


def write() -> None:
    """Measures in this process, whose threads must have one OpenMP thread each."""
    never, always = (rows(each.measure(), each.names[0]) for each in COMPARISONS)
    report(globals(), HEADERS, never, [Table("Everything recomputed", HEADERS, always)])


def main() -> None:
    # torchgpipe starts threads in every step; only the environment can limit their OpenMP threads.
    process.call("bench.compare.overhead:write")
