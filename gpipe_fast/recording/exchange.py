"""What processes exchange to record the stages of all of them, on the clock of the first.

A process has the events of its own stages, and the worker of a stage elsewhere receives here what that stage
sends. So the process that sends knows when a SEND ends, and the one that receives when the tensor arrives::

    process 0   0SEND_F2 ──┐ end
    process 1              └─── transit ─── 0SEND_F2 ──┐ end, then 1RECV_F2
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from gpipe_fast.recording.events import Event
from gpipe_fast.recording.recording import Recording
from gpipe_fast.recording.report import StageSizes
from gpipe_fast.recording.timeline import sender_of
from gpipe_fast.schedule import TRANSFERS, Action

# The offset of a process's clock to that of the first and the maximum error of the offset, in nanoseconds;
# and what the process passes.
Part = tuple[tuple[int, int], Any]


def exchange_stages(
    recording: Recording,
    own: Collection[int],
    exchange: Callable[[Any], Sequence[Part]],
    receives_in_recv: bool,
) -> None:
    """Gives a recording the events of all stages.

    Args:
        recording: what this process has recorded.
        own: its stages.
        exchange: returns what all processes pass.
        receives_in_recv: whether a stage receives tensors of other processes in its RECV, as on GPUs.
    """
    arrivals = _waits_of_receives if receives_in_recv else _receives
    passed = {
        "events": [_values(event) for stage in own for event in recording.stages[stage]],
        "arrivals": list(arrivals(recording, own)),
        "others": [(stage, recording.kernels[stage], recording.sizes[stage]) for stage in own],
    }
    merge(recording, exchange(passed))


def merge(recording: Recording, parts: Sequence[Part]) -> None:
    """Gives a recording what all processes have passed. Matches their runs from the last one backwards."""
    runs = [sorted({values[4] for values in part["events"]}) for _, part in parts]
    total = max(map(len, runs))
    # Since a run that has failed may have begun in some processes only, runs are numbered from the last.
    number = [{run: total - i for i, run in enumerate(reversed(own))} for own in runs]
    arrived = {
        (action, number[rank].get(run)): time + offset * 1e-9
        for rank, ((offset, _), part) in enumerate(parts)
        for action, run, time in part["arrivals"]
    }
    found: dict[int, list[Event]] = {stage: [] for _, part in parts for stage, *_ in part["others"]}
    for rank, ((offset, _), part) in enumerate(parts):
        for action, is_wait, begin, end, run, *others in part["events"]:
            times = begin + offset * 1e-9, end + offset * 1e-9
            event = Event(Action.parse(action), is_wait, *times, number[rank][run], *others)
            if not is_wait and (action, event.run) in arrived:
                event = replace(event, transit=max(0.0, arrived[action, event.run] - event.end))
            found[event.action.stage].append(event)
    recording.stages = tuple(tuple(found[stage]) for stage in sorted(found))
    of_stages = sorted(each for _, part in parts for each in part["others"])
    recording.kernels = tuple(tuple(kernels) for _, kernels, _ in of_stages)
    recording.sizes = tuple(StageSizes(*sizes) for *_, sizes in of_stages)
    recording.clock_error = sum(sorted(error for (_, error), _ in parts)[-2:]) * 1e-9


def _values(event: Event) -> tuple[Any, ...]:
    _, *others = vars(event).values()
    return str(event.action), *others


def _receives(recording: Recording, own: Collection[int]) -> Iterator[tuple[str, int, float]]:
    """Yields each SEND of a stage elsewhere, with its run and the time at which the tensor has arrived."""
    for stage, events in enumerate(recording.stages):
        for event in events:
            if stage not in own and event.action.kind in TRANSFERS and not event.is_wait:
                yield str(event.action), event.run, event.end + event.transit


def _waits_of_receives(recording: Recording, own: Collection[int]) -> Iterator[tuple[str, int, float]]:
    """As `_receives`, of tensors that a RECV has waited for; others came earlier."""
    for stage in own:
        for event in recording.stages[stage]:
            send = sender_of(event.action)
            if send is not None and send.stage not in own and event.is_wait and event.end > event.begin:
                yield str(send), event.run, event.end
