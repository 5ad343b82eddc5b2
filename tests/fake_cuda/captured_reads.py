"""Replays steps and logs which memory is alive before each; run by test_captured_reads.py.

`captured_reads.py OPERATORS MODELS DEVICES WORD...`: for each of MODELS (``mlp/batch norm/..``), runs five
steps of a pipeline on DEVICES. Between two steps it holds nothing of a step, and marks in the log the
memory that PyTorch's allocator considers in use, so that the test can tell what a replayed graph reads
outside of it. Words: a checkpoint mode (one run for each); ``inference``: forwards under `no_grad`;
``frozen``: the first stage needs no gradients; ``deferred``: deferred batch norm. Also compares outputs,
gradients and buffers with those of a pipeline that does not capture. Prints the differences, or "equal".
"""

from __future__ import annotations

import gc
import itertools
import sys

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.fake_cuda.fake_devices import load, mark
from tests.fake_cuda.train_models import CHUNKS, batch_of, layers_of
from tests.internals import pipeline_of

STEPS = 5


def mark_living_memory() -> None:
    """Marks the graphs' pools as a whole, and elsewhere the blocks that are in use."""
    mark("living")
    for segment in torch.cuda.memory_snapshot():
        if segment["segment_pool_id"] != (0, 0):
            mark(f"block\t{segment['address']:#x}\t{segment['total_size']}")
            continue
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                mark(f"block\t{block['address']:#x}\t{block['size']}")


class Run:
    """A pipeline with its input."""

    def __init__(self, model: str, devices: list[str], mode: str, words: list[str], *, capture: bool) -> None:
        torch.manual_seed(0)
        layers = layers_of(model)
        self.inference = "inference" in words
        self.pipeline = GPipe(
            nn.Sequential(*layers),
            [len(layers) // len(devices)] * len(devices),
            devices=devices,
            chunks=CHUNKS,
            checkpoint=mode,
            capture=capture,
            deferred_batch_norm="deferred" in words,
        )
        if "frozen" in words:
            self.pipeline.partitions[0].requires_grad_(False)
        self.x = batch_of(model).to(devices[0])

    def step(self) -> list[Tensor]:
        """Returns the output and the gradients, on the CPU."""
        torch.manual_seed(1)
        if self.inference:
            with torch.no_grad():
                return [self.pipeline(self.x).cpu()]
        y = self.pipeline(self.x)
        y.square().mean().backward()
        found = [p.grad.cpu() for p in self.pipeline.parameters() if p.grad is not None]
        self.pipeline.zero_grad()
        return [y.detach().cpu(), *found]

    def buffers(self) -> list[Tensor]:
        return [buffer.cpu() for buffer in self.pipeline.buffers()]


def differences(model: str, devices: list[str], mode: str, words: list[str]) -> list[str]:
    captured, plain = (Run(model, devices, mode, words, capture=capture) for capture in (True, False))
    found = []
    mark("pipeline")
    for step in range(STEPS):
        expected = plain.step()
        gc.collect()
        mark_living_memory()
        if not all(map(torch.equal, captured.step(), expected)):
            found.append(f"step {step}: results")
        # Takes over memory that only the graph refers to.
        taken = [torch.full((n,), 7.0, device=d) for d in set(devices) for n in (1, 2, 12, 200)]
        if not all(map(torch.equal, captured.buffers(), plain.buffers())):
            found.append(f"step {step}: buffers")
        del taken
    reports = [report for report in pipeline_of(captured.pipeline).graph_reports() if report.uncaptured > 1]
    if [report.replays for report in reports] != [STEPS - 2]:
        found.append(f"not captured: {[(report.obstacle, report.replays) for report in reports]}")
    return found


def main() -> None:
    operators, models, devices, *words = sys.argv[1:]
    load(operators)
    found = []
    modes = [word for word in words if word in CHECKPOINT_MODES] or ["except_last"]
    for model, mode in itertools.product(models.split("/"), modes):
        found += [f"{model}, {mode}: {what}" for what in differences(model, devices.split(","), mode, words)]
    print("; ".join(found) or "equal")


if __name__ == "__main__":
    main()
