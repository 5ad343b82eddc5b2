"""Proof that a schedule whose stages are in different processes cannot deadlock, however little the network
buffers.

Stages exchange tensors over channels, one for each pair of stages and direction. In the worst case a channel
buffers nothing: a SEND ends only once the receiving process has begun to receive. That process begins to
receive micro-batch i when the one before has arrived and a slot is free, whatever its stage is doing. So,
with S slots::

    RECV i waits for SEND i
    SEND i waits for RECV i - S

Skip tensors follow the boundary of their micro-batch. The process that pops them begins to receive them
together with the boundary from its neighbour. Up to A = 2 (t - s) tensors of a skip connection from stage s
to stage t may be under way, which the sender keeps. So::

    s SEND_F i waits for t - 1 SEND_F i - A - 1    and for t RECV_F i - A - S
    t SEND_B i waits for s + 1 SEND_B i - A - 1    and for s RECV_B i - A - S

Of P processes, process r has the stages r, r + P and so on. A skip connection between two of these needs no
channel.

A schedule is free of deadlock if nothing waits for itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
from itertools import chain, pairwise

from gpipe_fast.schedule.actions import Action, Kind
from gpipe_fast.schedule.schedule import Schedule

# The maximum number of tensors that a channel keeps until they are received, for each stage from one end to
# the other, as in csrc/transport/process_groups.cpp.
MAX_UNDER_WAY_PER_STAGE = 2


def check_unbuffered(
    schedule: Schedule, skips: Collection[tuple[int, int]] = (), num_processes: int | None = None
) -> None:
    """Checks that a schedule over several processes is free of deadlock over channels without buffers.

    Args:
        schedule: the schedule.
        skips: for each skip connection between stages, the stage that stashes and the stage that pops.
        num_processes: P; None for one for each stage.

    Raises:
        ValueError: it is not; the message names the actions that wait for each other. Or a rank of the
            schedule has stages of several processes; or stages send micro-batches in different orders, and
            skip tensors would be mixed up.
    """
    size = num_processes or schedule.num_stages
    for actions in schedule.ranks:
        stages = sorted({action.stage for action in actions})
        if len({stage % size for stage in stages}) > 1:
            raise ValueError(
                f"the schedule runs stages {stages} on one rank, but of the {size} processes of the mesh, "
                f"process r has the stages r, r + {size} and so on; pass a schedule whose ranks have the "
                "stages of one process"
            )
    waits = _waits(schedule, [(first, last) for first, last in skips if (last - first) % size])
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        cycle = reversed(error.args[1])  # each comes before the next
        raise ValueError(
            f"deadlock between processes with {schedule.slots} slots, if the network buffers nothing: "
            f"{' waits for '.join(map(str, cycle))}; pass a schedule that receives later, or has more slots"
        ) from None


def _waits(schedule: Schedule, skips: Collection[tuple[int, int]]) -> dict[Action, list[Action]]:
    """Returns, for each action, those for which it waits: as in any schedule, and for skip tensors."""
    waits: defaultdict[Action, list[Action]] = defaultdict(list)
    of: defaultdict[tuple[int, Kind], list[Action]] = defaultdict(list)
    pairs = [
        (b, a) for actions in schedule.ranks for a, b in pairwise(actions)
    ]  # stages of a rank take turns
    for action, before in (*pairs, *schedule.waits().items()):
        waits[action].append(before)
    for action in chain(*schedule.ranks):
        of[action.stage, action.kind].append(action)

    def add(sends: list[Action], others: list[Action], ahead: int) -> None:
        for send, other in zip(sends[ahead:], others, strict=False):
            waits[send].append(other)

    for first, last in skips:
        ahead = MAX_UNDER_WAY_PER_STAGE * (last - first)
        for send_kind, receive_kind, sender, receiver, near in (
            (Kind.SEND_F, Kind.RECV_F, first, last, last - 1),
            (Kind.SEND_B, Kind.RECV_B, last, first, first + 1),
        ):
            sends, carriers = of[sender, send_kind], of[near, send_kind]
            _check_order(sends, carriers)
            add(sends, of[receiver, receive_kind], ahead + schedule.slots)
            add(sends, carriers, ahead + 1)
    return waits


def _check_order(sends: list[Action], carriers: list[Action]) -> None:
    for send, carrier in zip(sends, carriers, strict=True):
        if send.microbatch != carrier.microbatch:
            raise ValueError(
                f"{send} sends a skip tensor to a stage that expects that of micro-batch "
                f"{carrier.microbatch}, with {carrier}; pass a schedule in which all stages have the same "
                "order of micro-batches"
            )
