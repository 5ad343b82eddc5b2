"""Vector clocks of a schedule: how many boundary tensors are in flight between two stages, for any timing.

A stage's vector clock counts, for every stage, the actions that have certainly completed before the stage's
next action (C. J. Fidge, "Timestamps in message-passing systems that preserve the partial ordering", 1988;
F. Mattern, "Virtual time and global states of distributed systems", 1989). A transfer is the message that
carries a clock: a RECV merges the clock of its SEND, and a SEND that reuses a slot merges the clock of the
RECV that freed the slot. Merging takes the element-wise maximum.
"""

from __future__ import annotations

from collections import defaultdict

from gpipe_fast.schedule.actions import TRANSFERS, Action, Kind
from gpipe_fast.schedule.schedule import Schedule


def max_in_flight(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Returns the maximum number of micro-batches in flight, by sender and receiver.

    A micro-batch is in flight from the begin of its SEND to the end of the receiver's last compute action on
    it, because a forward's boundary activation is kept for the backward. Two micro-batches count as in flight
    together unless the partial order of the actions excludes it, so no timing exceeds the result.
    """
    position = {action: i for actions in schedule.stages for i, action in enumerate(actions)}
    last = {
        (a.stage, a.microbatch): position[a]
        for row in schedule.stages
        for a in row
        if a.kind not in TRANSFERS
    }
    received: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for row in schedule.stages:
        for action in row:
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                received[_stages_of(action)].append(action)
    # clocks[i] is the vector clock of stage i: clocks[i][j] actions of stage j precede its next action.
    clocks = [[0] * schedule.num_stages for _ in range(schedule.num_stages)]
    clock_after: dict[Action, list[int]] = {}  # the sender's or receiver's clock after a transfer
    # By sender and receiver, the receiver's index of the last compute action on each micro-batch sent so far.
    last_uses: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    bounds: defaultdict[tuple[int, int], int] = defaultdict(int)
    for action in schedule.order():
        clock = clocks[action.stage]
        waits_for = None
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            waits_for = _matching_send(action)
        elif action.kind in TRANSFERS:
            before = len(last_uses[_stages_of(action)]) - schedule.slots
            waits_for = received[_stages_of(action)][before] if before >= 0 else None
        if waits_for is not None:
            clock = [max(own, other) for own, other in zip(clock, clock_after[waits_for], strict=True)]
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            pair = _stages_of(action)
            num_freed = sum(end < clock[pair[1]] for end in last_uses[pair])
            last_uses[pair].append(last[pair[1], action.microbatch])
            bounds[pair] = max(bounds[pair], len(last_uses[pair]) - num_freed)
        clocks[action.stage] = [*clock]
        clocks[action.stage][action.stage] = position[action] + 1
        if action.kind in TRANSFERS:
            clock_after[action] = [*clocks[action.stage]]
    return dict(bounds)


def _stages_of(action: Action) -> tuple[int, int]:
    """Returns the sender and the receiver of a transfer."""
    match action.kind:
        case Kind.SEND_F:
            return action.stage, action.stage + 1
        case Kind.RECV_F:
            return action.stage - 1, action.stage
        case Kind.SEND_B:
            return action.stage, action.stage - 1
        case _:
            return action.stage + 1, action.stage


def _matching_send(receive: Action) -> Action:
    """Returns the SEND that matches a RECV."""
    kind = Kind.SEND_F if receive.kind is Kind.RECV_F else Kind.SEND_B
    return Action(_stages_of(receive)[0], kind, receive.microbatch)
