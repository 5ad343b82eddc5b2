"""The demo's reports on a step: compiled, compared with the plain loop, drawn, and timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe_fast import GPipe, verify
from gpipe_fast.recording import Recording

ROUNDS = 5
COLUMNS = 96  # of a timeline
DRAWN = {"F", "R", "B", "I", "W"}  # kinds of actions; the others are transfers
Loss = Callable[[Tensor], Tensor]


def _step(model: nn.Module, tokens: Tensor, loss_fn: Loss) -> float:
    """Runs forward, loss and backward of a mini-batch; returns the seconds."""
    model.zero_grad()
    begin = time.perf_counter()
    loss_fn(model(tokens)).backward()
    return time.perf_counter() - begin


def time_first_steps(model: GPipe, tokens: Tensor, loss_fn: Loss) -> str:
    """Runs two steps, of which the first compiles the stages. The random state is left as it was."""
    model.train()
    with torch.random.fork_rng(devices=[]):
        first, second = (_step(model, tokens, loss_fn) for _ in range(2))
    model.zero_grad()
    return (
        f"first step: {first:.1f} s, in which each stage is traced and becomes a program that runs in C++\n"
        f"second step: {second:.2f} s"
    )


def compare_bits(model: GPipe, tokens: Tensor, loss_fn: Loss) -> str:
    """Compares a step with the plain loop over the same micro-batches; returns the result as text."""
    model.train()
    report = verify(model, tokens, loss_fn)
    if not report:
        return str(report)
    gradients = sum(row.name.startswith("gradient") for row in report.rows)
    return (
        f"same numbers: logits, loss and {gradients} gradients of a step equal those of the plain loop\n"
        f"  over the same {report.num_microbatches} micro-batches, bit for bit"
    )


class PlainLoop(nn.Module):
    """The equivalent without `GPipe`: a sequential loop over micro-batches with PyTorch's checkpointing.

    The loop recomputes the same partitions for the same micro-batches as the pipeline.
    """

    def __init__(self, model: GPipe, uses_random_ops: bool) -> None:
        super().__init__()
        layers = iter(model)
        self.partitions = nn.ModuleList(
            nn.Sequential(*(next(layers) for _ in range(size))) for size in model.balance
        )
        self.chunks, self.checkpoint = int(model.chunks), model.checkpoint
        self.uses_random_ops = uses_random_ops

    def forward(self, input: Tensor) -> Tensor:
        """Cuts a mini-batch into micro-batches, and runs one after the other."""
        parts = input.chunk(self.chunks)
        recomputed = {"always": len(parts), "except_last": len(parts) - 1, "never": 0}[str(self.checkpoint)]
        return torch.cat([self._run(part, index < recomputed) for index, part in enumerate(parts)])

    def _run(self, x: Tensor, recompute: bool) -> Tensor:
        for partition in self.partitions:
            if recompute:
                x = checkpoint(partition, x, use_reentrant=False, preserve_rng_state=self.uses_random_ops)
            else:
                x = partition(x)
        return x


def compare(model: GPipe, tokens: Tensor, loss_fn: Loss, uses_random_ops: bool) -> str:
    """Times the plain loop and the pipeline in turn, so that slowdowns affect both; returns a table.

    Small operators can be faster on one thread than on all, so the plain loop is timed with both.
    """
    threads, plain = torch.get_num_threads(), PlainLoop(model, uses_random_ops)
    candidates: list[tuple[str, nn.Module, int]] = [("plain loop", plain, n) for n in sorted({1, threads})]
    candidates.append(("GPipe", model, threads))
    times: list[list[float]] = [[] for _ in candidates]
    model.train()
    for _ in range(1 + ROUNDS):
        for (_, candidate, num_threads), found in zip(candidates, times, strict=True):
            torch.set_num_threads(num_threads)
            found.append(_step(candidate, tokens, loss_fn))
    medians = [statistics.median(found[1:]) for found in times]  # without the warm-up
    lines = [
        f"  {name:10} {n:3} thread{'s' * (n > 1):1} {seconds * 1e3:8.1f} ms, "
        f"{len(tokens) / seconds:.1f} samples/s"
        for (name, _, n), seconds in zip(candidates, medians, strict=True)
    ]
    lines[-1] += f", {min(medians[:-1]) / medians[-1]:.2f} times as many as the faster plain loop"
    explanation = (
        f"Forward, loss and backward of a mini-batch, median of {ROUNDS}. The plain loop runs the same\n"
        "micro-batches with torch.utils.checkpoint. GPipe's stages share its threads, but each has at least\n"
        "one. Other running programs disturb these times:"
    )
    return "\n".join([explanation, *lines])


def draw_step(model: GPipe, tokens: Tensor, loss_fn: Loss, path: Path) -> str:
    """Records steps without the optimiser's update; shows the fastest as a page and as text."""
    model.train()
    recordings = []
    for _ in range(ROUNDS):
        with model.recording() as recording:
            _step(model, tokens, loss_fn)
        recordings.append(recording)
    fastest = min(recordings, key=Recording.span)
    fastest.report().save(path, title=f"python -m examples.gpt: a GPT in {len(model.balance)} stages")
    return timeline(fastest)


def timeline(recording: Recording, columns: int = COLUMNS) -> str:
    """Returns a step as text: a row for each stage, with time to the right and idle time as dots."""
    events = {action: event for action, event in recording.latest.items() if action.kind.name in DRAWN}
    begin, end = min(e.begin for e in events.values()), max(e.end for e in events.values())
    rows = [["."] * columns for _ in recording.stages]
    for action, event in events.items():
        first, last = (round((at - begin) / (end - begin) * columns) for at in (event.begin, event.end))
        name, width = f"{action.kind.name}{action.microbatch}", last - first
        rows[action.stage][first:last] = (name if width >= len(name) else name[:1]).ljust(width, "=")[:width]
    lines = [
        f"A step of {(end - begin) * 1e3:.0f} ms, of which the stages are idle for {recording.bubble():.0%}:",
        *(f"  stage {stage} {''.join(row)}" for stage, row in enumerate(rows)),
        "  F3 is the forward of micro-batch 3, R3 its recompute, B3 its backward (or I3 and W3, its parts);",
        "  = continues an action; dots are idle time (the bubble), or the loss between forward and backward.",
    ]
    return "\n".join(lines)
