"""Events: what the engine records of each action."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    action: Action
    is_wait: bool
    begin: float
    end: float
    run: int = 0
