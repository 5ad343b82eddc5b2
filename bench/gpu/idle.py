"""A device's idle time, computed from the intervals in which it runs kernels and copies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

# torch.profiler recommends these settings if graphs are replayed between profiles.
os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
os.environ.setdefault("TEARDOWN_CUPTI", "0")

Interval = tuple[int, int]


def idle_share(intervals: Iterable[Interval]) -> float | None:
    """Returns the fraction of the time from the first start to the last end that no interval covers.

    Returns None without any interval.
    """
    ordered = sorted(intervals)
    if not ordered:
        return None
    first, busy, end = ordered[0][0], 0, ordered[0][0]
    for begin, finish in ordered:
        busy += max(0, finish - max(begin, end))
        end = max(end, finish)
    return 1 - busy / (end - first) if end > first else 0.0


def intervals(run: Callable[[], object], device: str) -> list[Interval]:
    """Profiles `run` and returns start and end (ns) of each kernel and copy; on the CPU, of each operator."""
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
