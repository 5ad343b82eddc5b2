"""Forward and recomputing backward of GPT blocks, compared with eager checkpointing, each in its own process.

In one process, the two would share the C library's heap: the state in which one leaves the heap determines
how many pages the kernel must zero for the other. Programs keep their own memory, so eager's time would
depend on what ran before.

Forward and recomputing backward, width 256, 8 heads, 2 x 128 tokens. Medians of {PROCESSES} alternating
processes of each kind; each reports the median of 30 runs. Outputs and gradients are bitwise equal to
eager's.
"""

from __future__ import annotations

from statistics import median

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench import process
from bench.measure import alternate, report
from bench.micro.execution import check, prepare
from bench.models.gpt import blocks

PROCESSES = 5  # processes of each kind; the kinds alternate


def ours(count: int) -> float:
    """Returns the median time (µs) of a stage's two programs, which add to existing gradients."""
    stage, forward_graph, backward_graph = prepare(blocks(count), torch.randn(2, 128, 256))
    forward, backward = (stage.program(g) for g in (forward_graph, backward_graph))
    check(stage, forward, backward)

    def step() -> None:
        forward(True)
        backward(False)

    return alternate({"ours": step}, rounds=30)["ours"].median


def eager(count: int) -> float:
    """Returns the median time (µs) in eager mode, checkpointed as a whole, adding to existing gradients."""
    model, input = nn.Sequential(*blocks(count)), torch.randn(2, 128, 256, requires_grad=True)
    tangent = torch.randn(2, 128, 256)

    def step() -> None:
        checkpoint(model, input, use_reentrant=False).backward(tangent)

    return alternate({"eager": step}, rounds=30)["eager"].median


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for count in (1, 2, 4):
        pairs = [
            [process.call(f"bench.micro.recompute:{kind}", count) for kind in ("ours", "eager")]
            for _ in range(PROCESSES)
        ]
        own, theirs = (median(times) for times in zip(*pairs, strict=True))
        ratios = sorted(e / o for o, e in pairs)
        rows.append([count, theirs / 1e3, own / 1e3, theirs / own, f"{ratios[0]:.2f} to {ratios[-1]:.2f}"])
    report(
        globals(),
        ["blocks", "eager with checkpoint, ms", "gpipe_fast, ms", "speedup", "speedup, min to max"],
        rows,
    )
