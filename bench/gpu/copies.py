"""Bandwidth of stage boundaries, compared with plain copies of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor, nn

from bench.gpu.findings import Findings
from bench.measure import alternate
from gpipe_fast import GPipe

NAME = "copies"
TITLE = "Bandwidth of a boundary between two stages, compared with plain copies of the same bytes"
BYTES, SMALL_BYTES, CHUNKS, ROUNDS = 512 << 20, 1 << 16, (1, 8), 15


def device_pairs(device: str) -> dict[str, tuple[str, str]]:
    """Returns the devices of the two stages for each transport and placement."""
    found = {f"{transport}, the same device": (device, device) for transport in ("pinned", "peer")}
    if torch.device(device).type == "cuda" and torch.cuda.device_count() > 1:
        found |= {f"{transport}, two devices": ("cuda:0", "cuda:1") for transport in ("pinned", "peer")}
    return found


def boundary_pipeline(source: str, target: str, transport: str, chunks: int) -> nn.Module:
    """Returns a pipeline of two stages that do nothing but pass the mini-batch on."""
    layers = nn.Sequential(nn.Identity(), nn.Identity())
    return GPipe(layers, [1, 1], devices=[source, target], chunks=chunks, transport=transport)


def plain_copy(transport: str, x: Tensor, target: str) -> Callable[[], object]:
    """Returns the reference for a transport's bandwidth: a single copy of the same bytes."""
    pinned = transport == "pinned"
    target_buffer = torch.empty_like(
        x, device="cpu" if pinned else target, pin_memory=pinned and torch.cuda.is_available()
    )
    return lambda: target_buffer.copy_(x, non_blocking=True)


def measure(findings: Findings, device: str, small: bool, without: Collection[str] = ()) -> None:
    """Measures the bandwidth (GB/s) of each path.

    The copy time is the time of the path minus the time of a hand-off without a copy.
    """
    num_bytes = SMALL_BYTES if small else BYTES
    for name, (source, target) in device_pairs(device).items():
        transport = name.partition(",")[0]
        x = torch.rand(64, num_bytes // 256, device=source)
        for chunks in CHUNKS:
            title = f"{name}, M = {chunks}"
            if title in without:
                continue
            findings.set_running(title)
            try:
                found = _measure(x, source, target, transport, chunks, 2 if small else ROUNDS)
                findings.record(title, **found)
            except Exception as error:
                findings.fail(title, error)
    findings.set_running(None)


def _measure(
    x: Tensor, source: str, target: str, transport: str, chunks: int, rounds: int
) -> dict[str, float | None]:
    copying_pipeline = boundary_pipeline(source, target, transport, chunks)
    copyless_pipeline = boundary_pipeline(source, source, "auto", chunks)
    with torch.no_grad():
        for pipe in (copying_pipeline, copyless_pipeline):
            for _ in range(3):
                if not torch.equal(pipe(x).to(x.device), x):
                    raise AssertionError("the received tensor differs from the sent one")
        candidates = {
            "path": lambda: copying_pipeline(x),
            "none": lambda: copyless_pipeline(x),
            "copy": plain_copy(transport, x, target),
        }
        finished = {name: partial(_finish, candidate) for name, candidate in candidates.items()}
        timings = alternate(finished, rounds)
    path, none, copy = (timings[name].median / 1e6 for name in ("path", "none", "copy"))
    found = {"path_us": path * 1e6, "hand_over_us": none * 1e6, "plain_gbps": x.nbytes / copy / 1e9}
    # If the path takes no longer than a hand-off without a copy, the bandwidth is not measurable.
    rate = x.nbytes / (path - none) / 1e9 if path > none else None
    return {**found, "gbps": rate, "share": rate and rate / found["plain_gbps"]}


def _finish(run: Callable[[], object]) -> None:
    run()
    if torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
