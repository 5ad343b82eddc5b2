"""How long a device does nothing, by the intervals in which it runs kernels and copies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

# As torch.profiler itself wants it where graphs are replayed between profiles.
os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
os.environ.setdefault("TEARDOWN_CUPTI", "0")

Interval = tuple[int, int]


def idle_share(intervals: Iterable[Interval]) -> float | None:
    """Of the time from the first begin to the last end, in which there is no interval; None without any."""
    ordered = sorted(intervals)
    if not ordered:
        return None
    first, busy, end = ordered[0][0], 0, ordered[0][0]
    for begin, finish in ordered:
        busy += max(0, finish - max(begin, end))
        end = max(end, finish)
    return 1 - busy / (end - first) if end > first else 0.0


def intervals(run: Callable[[], object], device: str) -> list[Interval]:
    """Begins and ends, in ns, of what a device does while something runs; of operators on the CPU."""
    gpu = torch.device(device).type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as profiler:
        run()
        if gpu:
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if gpu else DeviceType.CPU
    results = profiler.profiler.kineto_results
    return [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results.events()
        if event.device_type() == wanted and not event.is_user_annotation()
    ]
