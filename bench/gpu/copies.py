"""Bandwidth of stage boundaries, compared with plain copies of the same bytes."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from bench.gpu.children import failure
from bench.gpu.subjects import Synchronized
from bench.measure import alternate
from gpipe_fast import GPipe

NAME = "copies"
TITLE = "Bandwidth of a boundary between two stages, compared with plain copies of the same bytes"
HEADERS = ["path", "GB/s", "plain copy, GB/s", "share", "hand-off, µs"]
BYTES, SMALL_BYTES, ROUNDS = 512 << 20, 1 << 16, 15


def rows(device: str) -> list[list[object]]:
    """Returns a row for each transport, placement and number of micro-batches."""
    pairs = {"the same device": (device, device)}
    if torch.device(device).type == "cuda" and torch.cuda.device_count() > 1:
        pairs["two devices"] = ("cuda:0", "cuda:1")
    found: list[list[object]] = []
    for transport in ("pinned", "peer"):
        for place, (source, target) in pairs.items():
            for chunks in (1, 8):
                name = f"{transport}, {place}, M = {chunks}"
                try:
                    found.append([name, *_measure(source, target, transport, chunks)])
                except Exception as error:
                    found.append([name, failure(error)])
    return found


def _pipeline(source: str, target: str, transport: str, chunks: int) -> nn.Module:
    """Returns a pipeline of two stages that do nothing but pass the mini-batch on."""
    layers = nn.Sequential(nn.Identity(), nn.Identity())
    return GPipe(layers, [1, 1], devices=[source, target], chunks=chunks, transport=transport)


def _measure(source: str, target: str, transport: str, chunks: int) -> list[object]:
    """Returns the rate of a path; its time is that of a hand-off with a copy, less that of one without."""
    gpu = torch.device(source).type == "cuda"
    x = torch.rand(64, (BYTES if gpu else SMALL_BYTES) // 256, device=source)
    pinned = transport == "pinned"
    buffer = torch.empty_like(x, device="cpu" if pinned else target, pin_memory=pinned and gpu)
    with torch.no_grad():
        copying, copyless = (
            _pipeline(source, target, transport, chunks),
            _pipeline(source, source, "auto", chunks),
        )
        for pipe in (copying, copyless):
            for _ in range(3):
                received: Tensor = pipe(x)
                assert torch.equal(received.to(x.device), x), "the received tensor differs from the sent one"
        candidates = {
            "path": Synchronized(partial(copying, x), source, target),
            "none": Synchronized(partial(copyless, x), source),
            "copy": Synchronized(partial(buffer.copy_, x, non_blocking=True), source, target),
        }
        times = {name: each.median * 1e3 for name, each in alternate(candidates, ROUNDS).items()}  # ns
    plain, taken = x.nbytes / times["copy"], times["path"] - times["none"]
    # If the path takes no longer than a hand-off without a copy, the bandwidth is not measurable.
    rate = x.nbytes / taken if taken > 0 else None
    shown = ["-", "-"] if rate is None else [f"{rate:.1f}", f"{rate / plain:.0%}"]
    return [shown[0], f"{plain:.1f}", shown[1], f"{times['none'] / 1e3:.0f}"]
