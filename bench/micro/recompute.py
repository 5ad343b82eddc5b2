"""Forward and recomputing backward of GPT blocks, compared with eager checkpointing, each in its own process.

In one process, the two would share the C library's heap: the state in which one leaves the heap determines
how many pages the kernel must zero for the other. Programs keep their own memory, so eager's time would
depend on what ran before.
"""

from __future__ import annotations

import subprocess
import sys
from statistics import median

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.measure import ROOT, alternate, report
from bench.micro.execution import check, prepare
from bench.models.gpt import blocks

PROCESSES = 5  # processes of each kind; the kinds alternate


def ours(count: int) -> float:
    """Returns the median time (µs) of a stage's two programs, which add to existing gradients."""
    stage, forward_graph, backward_graph = prepare(blocks(count), torch.randn(2, 128, 256))
    forward, backward = (stage.program(g, plain=False) for g in (forward_graph, backward_graph))
    check(stage, [(forward, backward)])

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


def run_in_new_process(kind: str, count: int) -> float:
    """Runs `ours` or `eager` in a new process and returns its result."""
    command = [sys.executable, "-m", "bench.micro.recompute", kind, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return float(done.stdout.split()[-1])


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for count in (1, 2, 4):
        pairs = [
            (run_in_new_process("ours", count), run_in_new_process("eager", count)) for _ in range(PROCESSES)
        ]
        own, theirs = (median(times) for times in zip(*pairs, strict=True))
        ratios = sorted(e / o for o, e in pairs)
        rows.append([count, theirs / 1e3, own / 1e3, theirs / own, f"{ratios[0]:.2f} to {ratios[-1]:.2f}"])
    report(
        "recompute",
        "Full recompute of GPT blocks",
        ["blocks", "eager with checkpoint, ms", "gpipe_fast, ms", "speedup", "speedup, min to max"],
        rows,
        "Forward and recomputing backward, width 256, 8 heads, 2 x 128 tokens. Medians of "
        f"{PROCESSES} alternating processes of each kind; each reports the median of 30 runs. Outputs "
        "and gradients are bitwise equal to eager's.\n",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind, count = sys.argv[1:]
    print({"ours": ours, "eager": eager}[kind](int(count)))
