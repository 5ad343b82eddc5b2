"""How many boundary tensors lie between two stages at once, whatever the timing: from a schedule alone."""

from __future__ import annotations

from collections import defaultdict

from gpipe_fast.schedule.actions import TRANSFERS, Action, Kind
from gpipe_fast.schedule.schedule import Schedule


def most_at_once(schedule: Schedule) -> dict[tuple[int, int], int]:
    """By sender and receiver, the most micro-batches whose boundary tensors may lie there at once.

    A slot is taken when its SEND begins, and free when the receiver has done the last that it does with the
    micro-batch: what arrives for a forward is kept for the backward. Counted are all that the order of
    actions does not keep apart, so that no timing needs more.
    """
    place = {action: i for actions in schedule.stages for i, action in enumerate(actions)}
    last = {
        (a.stage, a.microbatch): place[a] for row in schedule.stages for a in row if a.kind not in TRANSFERS
    }
    received: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for row in schedule.stages:
        for action in row:
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                received[_edge(action)].append(action)
    # Of every stage, how many of each stage's actions are done before its next one.
    known = [[0] * schedule.num_stages for _ in range(schedule.num_stages)]
    after: dict[Action, list[int]] = {}  # likewise, behind a transfer
    ends: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # of each slot: its last use
    needed: defaultdict[tuple[int, int], int] = defaultdict(int)
    for action in schedule.order():
        clock = known[action.stage]
        awaited = None
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            awaited = _sent(action)
        elif action.kind in TRANSFERS:
            before = len(ends[_edge(action)]) - schedule.slots
            awaited = received[_edge(action)][before] if before >= 0 else None
        if awaited is not None:
            clock = [max(own, other) for own, other in zip(clock, after[awaited], strict=True)]
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            edge = _edge(action)
            free = sum(end < clock[edge[1]] for end in ends[edge])
            ends[edge].append(last[edge[1], action.microbatch])
            needed[edge] = max(needed[edge], len(ends[edge]) - free)
        known[action.stage] = [*clock]
        known[action.stage][action.stage] = place[action] + 1
        if action.kind in TRANSFERS:
            after[action] = [*known[action.stage]]
    return dict(needed)


def _edge(action: Action) -> tuple[int, int]:
    """Sender and receiver of a transfer."""
    match action.kind:
        case Kind.SEND_F:
            return action.stage, action.stage + 1
        case Kind.RECV_F:
            return action.stage - 1, action.stage
        case Kind.SEND_B:
            return action.stage, action.stage - 1
        case _:
            return action.stage + 1, action.stage


def _sent(receive: Action) -> Action:
    kind = Kind.SEND_F if receive.kind is Kind.RECV_F else Kind.SEND_B
    return Action(_edge(receive)[0], kind, receive.microbatch)
