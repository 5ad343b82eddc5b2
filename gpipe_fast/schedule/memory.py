"""The memory model: what a stage needs at most, from the order of its actions and what each changes.

An order is walked once, and counted for many choices of what to save. Here each micro-batch keeps 3 bytes
from its forward to the end of its backward, and 4 more from the begin of its backward on::

    actions  F0  F1  B0      F2  B1      B2
    moments  F0  F1  R0  B0  F2  R1  B1  R2  B2
    bytes     3   6  10   3   6  10   3   7   0     at most 10
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from gpipe_fast.schedule.actions import TRANSFERS, Action, Kind
from gpipe_fast.schedule.schedule import Schedule


class Change(NamedTuple):
    """What an action allocates or frees.

    Attributes:
        part: what the bytes are for.
        left: how many more bytes are needed after the action; negative if it frees.
        most: how many more are needed at a time while it runs, if that is more.
    """

    part: str
    left: float
    most: float = 0.0


# An action as a stage sees it: whose it is (0: its own, -1: of the stage before it, and so on), the kind, and
# whether it is part of a backward, and no backward of the stage has ended.
Event = tuple[int, Kind, bool]
# A micro-batch, and an event that concerns it.
Moment = tuple[int, Event]
# What the events of a micro-batch change, in order.
Changes = Mapping[Event, Iterable[Change]]


def moments(
    order: Iterable[Action], stage: int, waiting: Set[Kind] = frozenset(), holds: bool = False
) -> list[Moment]:
    """Returns the micro-batches and events at which what a stage needs changes, in order.

    Every B and I follows an R, which allocates what is needed before a gradient arrives.

    Args:
        order: the actions of the stage, and of the stages that send to it or fetch from it.
        stage: the stage.
        waiting: the kinds of SENDs whose tensor stays until the next one is sent; others are freed at once.
        holds: whether the gradients that the stage has sent stay from an I to its W.
    """
    found: list[Moment] = []
    sent: dict[Kind, list[Moment]] = {}
    held: list[Moment] | None = None
    begun: set[int] = set()
    is_first = True
    for sender, kind, m in order:
        is_own = sender == stage
        is_backward = is_own and kind in (Kind.R, Kind.B, Kind.I, Kind.W)
        moment = m, (sender - stage, kind, is_backward and is_first)
        if is_backward and kind is not Kind.W and m not in begun:
            begun.add(m)
            found.append((m, (0, Kind.R, is_first)))
        if is_own and kind in waiting:
            found += sent.get(kind, [])
            sent[kind] = [moment]
        elif held is not None and kind in ((Kind.SEND_B,) if is_own else (Kind.B, Kind.I)):
            held.append(moment)
        elif not is_own or kind is not Kind.R:
            found.append(moment)
        if is_own and kind is Kind.I and holds:
            held = []
        elif is_own and kind in (Kind.B, Kind.W):
            found += held or []
            held, is_first = None, False
    return found


def peak_of(
    walked: Iterable[Moment], changes: Sequence[Changes], fixed: Mapping[str, float]
) -> dict[str, float]:
    """Returns what a stage needs when it needs most, in bytes, by what they are for.

    Args:
        walked: its `moments`.
        changes: those of each micro-batch.
        fixed: what it needs at all times.
    """
    now, at_peak = defaultdict(float, fixed), dict(fixed)
    total = peak = sum(fixed.values())
    for m, event in walked:
        for part, left, most in changes[m].get(event, ()):
            more = most if most > left else left
            if total + more > peak:
                peak = total + more
                at_peak = now | {part: now[part] + more}
            total += left
            now[part] += left
    return at_peak


def keeps(kept: float, more: float = 0.0) -> Changes:
    """Returns the changes of a micro-batch of which only sums are known.

    Args:
        kept: what is kept of it from its forward to the end of its backward.
        more: what is kept in addition from the begin of its backward on.
    """
    own = {Kind.F: kept, Kind.R: more, Kind.B: -(kept + more), Kind.W: -(kept + more)}
    return {(0, kind, is_first): [Change("kept", x)] for kind, x in own.items() for is_first in (False, True)}


def peaks(schedule: Schedule, kept: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Returns the most that each stage keeps, given `kept` and `more` of `keeps` for each micro-batch."""
    rows = zip(schedule.stages, kept, strict=True)
    return [
        sum(peak_of(moments(actions, stage), [keeps(*own) for own in row], {}).values())
        for stage, (actions, row) in enumerate(rows)
    ]


def max_in_flight(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Returns the maximum number of micro-batches in flight, by sender and receiver, for any timing.

    A micro-batch is in flight from the begin of its SEND to the end of the receiver's last compute action on
    it, because a forward's boundary activation is kept for the backward.
    """
    computed = (action for row in schedule.stages for action in row if action.kind not in TRANSFERS)
    last = {(action.stage, action.microbatch): action for action in computed}
    found: dict[tuple[int, int], int] = {}
    for sender in range(schedule.num_stages):
        late = schedule.order_around(sender, lambda action: False)
        for receiver, kind in ((sender + 1, Kind.SEND_F), (sender - 1, Kind.SEND_B)):
            number = 0
            for action in late:
                if (action.stage, action.kind) == (sender, kind):
                    number += 1
                    found[sender, receiver] = max(number, found.get((sender, receiver), 0))
                number -= action == last.get((receiver, action.microbatch))
    return found
