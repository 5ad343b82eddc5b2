"""Events: what the engine records of each action.

On GPUs the times are those at which the device executes an action, from stream events, and a RECV waits for
the copy of its tensor. On the CPU they are the worker's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gpipe_fast.schedule import Action


@dataclass(frozen=True)
class Event:
    """The execution of an action, or the wait at its slot just before it.

    Attributes:
        action: the action.
        is_wait: whether the event is the wait.
        begin: seconds, on the clock of ``time.monotonic()``.
        end: seconds, on the same clock.
        run: number of the engine run, increasing; a forward and its backward are separate runs.
        boundary_bytes: bytes of the boundary tensors that the stage keeps of the action's micro-batch after
            the action, except those that autograd keeps for Python layers; 0 for a wait.
        saved_bytes: bytes of the other tensors that it keeps, with the same exception.
        scratch_bytes: bytes of scratch memory that the programs of the micro-batch need while they run.
        transit: for a SEND, the seconds from its end until the tensor has arrived; 0 on the CPU. Copies on
            GPUs take no time of the stages.
    """

    action: Action
    is_wait: bool
    begin: float
    end: float
    run: int = 0
    boundary_bytes: int = 0
    saved_bytes: int = 0
    scratch_bytes: int = 0
    transit: float = 0.0


class PythonTime(NamedTuple):
    """The time of layers in Python in an action; as `LayerTime`, but for the stage."""

    action: Action
    layer: int
    name: str
    seconds: float
    operators: float
    recompute: float


def kept_after(events: Iterable[Event]) -> Iterator[tuple[Event, int, int]]:
    """Yields events by their ends, with the boundary bytes and the saved bytes that stages then keep."""
    kept: dict[tuple[int, int], tuple[int, int]] = {}
    boundary = saved = 0
    for event in sorted(events, key=lambda event: event.end):
        place = event.action.stage, event.action.microbatch
        before = kept.get(place, (0, 0))
        kept[place] = event.boundary_bytes, event.saved_bytes
        boundary += event.boundary_bytes - before[0]
        saved += event.saved_bytes - before[1]
        yield event, boundary, saved
