"""The demo's final report: the pipeline compared with the plain loop, and the timeline of one step."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from examples.gpt.train import cross_entropy
from gpipe_fast import GPipe
from gpipe_fast._extension import kept_bytes
from gpipe_fast.inspect.picture import draw

ROUNDS = 5
ACTIVATIONS_NOTE = (
    "activations: total at the end of the forward; a recompute adds those of one micro-batch in one stage"
)


class PlainLoop(nn.Module):
    """The equivalent without `GPipe`: a sequential loop over micro-batches with PyTorch's checkpointing.

    The loop recomputes the same partitions for the same micro-batches as the pipeline.
    """

    def __init__(self, model: GPipe, chunks: int, uses_random_ops: bool) -> None:
        super().__init__()
        layers = iter(model)
        self.partitions = nn.ModuleList(
            nn.Sequential(*(next(layers) for _ in range(size))) for size in model.balance
        )
        self.chunks, self.checkpoint, self.uses_random_ops = chunks, model.checkpoint, uses_random_ops

    def forward(self, input: Tensor) -> Tensor:
        """Cuts a mini-batch into micro-batches, and runs one after the other."""
        parts = input.chunk(self.chunks)
        recomputed = {"always": len(parts), "except_last": len(parts) - 1, "never": 0}[self.checkpoint]
        return torch.cat([self._run(part, index < recomputed) for index, part in enumerate(parts)])

    def _run(self, x: Tensor, recompute: bool) -> Tensor:
        for partition in self.partitions:
            if recompute:
                x = checkpoint(partition, x, use_reentrant=False, preserve_rng_state=self.uses_random_ops)
            else:
                x = partition(x)
        return x


def compare(model: GPipe, tokens: Tensor, targets: Tensor, args: argparse.Namespace) -> str:
    """Times the plain loop and the pipeline in turn, so that slowdowns affect both; returns a table."""
    plain = PlainLoop(model, args.chunks, args.dropout > 0)
    candidates: dict[str, nn.Module] = {"plain loop with checkpointing": plain, "GPipe": model}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    model.train()
    for _ in range(1 + ROUNDS):
        for name, candidate in candidates.items():
            begin = time.perf_counter()
            _forward_backward(candidate, tokens, targets)
            times[name].append(time.perf_counter() - begin)
    medians = [statistics.median(found[1:]) for found in times.values()]  # without the warm-up
    saved = [saved_bytes(plain, tokens), kept_bytes(model(tokens))]
    rows = [
        (name, seconds * 1e3, len(tokens) / seconds, count / 2**20, medians[0] / seconds)
        for name, seconds, count in zip(candidates, medians, saved, strict=True)
    ]
    headers = ("", "step, ms", "samples/s", "activations, MiB", "speedup")
    table: str = tabulate(rows, headers, tablefmt="simple", floatfmt=("", ".1f", ".1f", ".2f", ".2f"))
    return f"{table}\n{ACTIVATIONS_NOTE}"


def _forward_backward(model: nn.Module, tokens: Tensor, targets: Tensor) -> None:
    model.zero_grad()
    cross_entropy(model(tokens), targets).backward()


def saved_bytes(model: nn.Module, input: Tensor) -> int:
    """Returns the bytes that autograd saves in a forward for the backward, without parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, int] = {}

    def record_storage(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(record_storage, lambda tensor: tensor):
        output = model(input)
    del output
    return sum(storages.values())


def draw_step(model: GPipe, tokens: Tensor, targets: Tensor, path: Path) -> None:
    """Records a training step without the optimiser's update, and writes its timeline as an SVG file."""
    model.train()
    with model.recording() as recording:
        _forward_backward(model, tokens, targets)
    path.write_text(draw(recording, title="gpipe_fast.demo"), encoding="utf-8")
