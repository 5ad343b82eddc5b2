"""Where the time of a profiled step is: the union of its kernels' intervals by kind, and idle time.

    product      ███████     ████           GEMMs and convolutions of libraries, by their kernels' names
    attention           ███                 fused attention of libraries
    generated       ████        ████        Triton kernels: ours by their names, Inductor's by "triton_"
    copy       ██                           copies and fills
    other                            █      the rest, such as element-wise kernels of PyTorch
    idle         ░                  ░       no kernel runs

Time in which kernels of several kinds run counts for the first of them in this order, so that the shares add
up to the step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType

PRODUCT, ATTENTION, GENERATED, COPY, OTHER, IDLE = KINDS = (
    "product", "attention", "generated", "copy", "other", "idle",
)  # fmt: skip
STEP = "bench: step"
# Attention comes first: its kernels may have a product's words in their names, too.
_RULES = (
    (COPY, r"^mem(cpy|set)\b"),
    (ATTENTION, r"fmha|flash|sdpa|attention"),
    (PRODUCT, r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|conv|wgrad|dgrad|fprop|winograd"),
    (GENERATED, r"^triton_"),
)


class Interval(NamedTuple):
    """A kernel's name, and its time on the device in microseconds."""

    name: str
    begin: float
    end: float


def kind_of(name: str, generated: Collection[str] = ()) -> str:
    """Returns the kind of a kernel by its name; `generated` has the names of our own kernels."""
    if name in generated:
        return GENERATED
    return next((kind for kind, words in _RULES if re.search(words, name, re.IGNORECASE)), OTHER)


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals."""
    length, last = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, last))
        last = max(last, end)
    return length


def shares(
    intervals: Iterable[Interval], begin: float, end: float, generated: Collection[str] = ()
) -> dict[str, float]:
    """Returns the microseconds of each kind between two times; they add up to the time between them."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for each in intervals:
        clipped = max(each.begin, begin), min(each.end, end)
        if clipped[0] < clipped[1]:
            spans.setdefault(kind_of(each.name, generated), []).append(clipped)
    found, seen, covered = {}, list[tuple[float, float]](), 0.0
    for kind in KINDS[:-1]:
        seen += spans.get(kind, [])
        found[kind], covered = union(seen) - covered, union(seen)
    return {**found, IDLE: end - begin - covered}


def time_by_name(intervals: Iterable[Interval]) -> dict[str, tuple[int, float]]:
    """Returns the number of kernels and the sum of their microseconds by name, the longest first."""
    found: dict[str, tuple[int, float]] = {}
    for name, begin, end in intervals:
        number, taken = found.get(name, (0, 0.0))
        found[name] = number + 1, taken + end - begin
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


class Profile(NamedTuple):
    """The kernels of a step, and the microseconds of its begin and end on the host, which waits for them."""

    intervals: list[Interval]
    begin: float
    end: float


def profiled(step: Callable[[], object]) -> Profile:
    """Profiles a step that ends when the device has finished."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        step()  # the first one also starts the profiler of the device
        with torch.profiler.record_function(STEP):
            step()
    return profile_of(profiler.events() or ())


def profile_of(events: Sequence[Any]) -> Profile:
    """Returns the kernels of the annotated step; annotations have intervals on the device, too."""
    on_host = [e for e in events if e.name == STEP and e.device_type == DeviceType.CPU]
    (begin, end) = (on_host[-1].time_range.start, on_host[-1].time_range.end)
    found = [
        Interval(e.name, e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type == DeviceType.CUDA and not e.is_user_annotation
    ]
    return Profile([each for each in found if begin <= each.begin < end], begin, end)
