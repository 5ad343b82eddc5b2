"""Forward and recomputing backward of GPT blocks against eager checkpointing, each in a process of its own.

Within one process the two share the C library's heap, and how one leaves it decides how many pages the
other has zeroed for it; a program keeps its own memory, so eager's time would depend on its neighbour.
"""

from __future__ import annotations

import subprocess
import sys
from statistics import median

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.execution import check, prepare
from bench.measure import ROOT, alternate, report
from bench.models.gpt import blocks

PROCESSES = 5  # of each kind, alternating


def ours(count: int) -> float:
    """Median µs of a stage's two programs, adding to the gradients of an earlier micro-batch."""
    stage, forward_graph, backward_graph = prepare(blocks(count), torch.randn(2, 128, 256))
    forward, backward = (stage.program(g, plain=False) for g in (forward_graph, backward_graph))
    check(stage, [(forward, backward)])

    def step() -> None:
        forward(True)
        backward(False)

    return alternate({"ours": step}, rounds=30)["ours"].median


def eager(count: int) -> float:
    """Median µs of the same in eager mode, checkpointed as a whole; gradients add up too."""
    model, input = nn.Sequential(*blocks(count)), torch.randn(2, 128, 256, requires_grad=True)
    tangent = torch.randn(2, 128, 256)

    def step() -> None:
        checkpoint(model, input, use_reentrant=False).backward(tangent)

    return alternate({"eager": step}, rounds=30)["eager"].median


def elsewhere(kind: str, count: int) -> float:
    """Runs ``ours`` or ``eager`` in a new process."""
    command = [sys.executable, "-m", "bench.recompute", kind, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return float(done.stdout.split()[-1])


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for count in (1, 2, 4):
        pairs = [(elsewhere("ours", count), elsewhere("eager", count)) for _ in range(PROCESSES)]
        own, theirs = (median(times) for times in zip(*pairs, strict=True))
        ratios = sorted(e / o for o, e in pairs)
        rows.append([count, theirs / 1e3, own / 1e3, theirs / own, f"{ratios[0]:.2f} to {ratios[-1]:.2f}"])
    report(
        "recompute",
        "Full recompute of GPT blocks",
        ["blocks", "eager with checkpoint, ms", "gpipe_fast, ms", "times faster", "pairs"],
        rows,
        "Forward and recomputing backward, width 256, 8 heads, 2 x 128 tokens; medians of "
        f"{PROCESSES} processes of each kind, alternating, each a median of 30 runs. Outputs and gradients "
        "were checked to be eager's, bit for bit.\n",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind, count = sys.argv[1:]
    print({"ours": ours, "eager": eager}[kind](int(count)))
