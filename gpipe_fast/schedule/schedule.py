"""Schedules: the actions of every stage, which are validated, ordered, timed and drawn."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, chain, pairwise

from gpipe_fast.schedule.actions import (
    BACKWARD,
    Action,
    Kind,
    backward_steps,
    forward_steps,
    tick,
)


@dataclass(frozen=True)
class Schedule:
    """The actions of every stage, in the order in which the stage runs them. Every instance is valid.

    A schedule has forwards, backwards or both, of every micro-batch on every stage; a backward is a B, or an
    I and a W, and an R may precede it. A RECV waits for its SEND. A SEND waits while all slots of its
    connection are taken; a slot is taken from the end of a SEND to the end of its RECV.

    Attributes:
        stages: actions by stage.
        num_microbatches: M.
        slots: boundary tensors that may wait on a connection, in one direction.

    Raises:
        ValueError: a stage lacks or misplaces an action, a connection reorders tensors, or a deadlock exists.
    """

    stages: tuple[tuple[Action, ...], ...]
    num_microbatches: int
    slots: int

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_microbatches", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        backward = any(action.kind in BACKWARD for action in self._actions)
        forward = not backward or any(action.kind not in BACKWARD for action in self._actions)
        for stage, actions in enumerate(self.stages):
            _check_stage(stage, actions, self.num_stages, self.num_microbatches, forward, backward)
        for i, j in chain(*(zip(*pair, strict=True) for pair in self._transfers())):
            send, receive = self._actions[i], self._actions[j]
            if send.microbatch != receive.microbatch:
                raise ValueError(f"{receive} would receive from {send}, but a connection keeps its order")
        self.order()

    @classmethod
    def parse(cls, text: str, *, slots: int | None = None) -> Schedule:
        """Parses one row of comma-separated actions per stage; ignores blanks. ``slots`` defaults to M.

        Raises:
            ValueError: a cell is not an action, or the schedule is invalid.
        """
        rows = [row.split(",") for row in text.splitlines() if row.strip()]
        stages = tuple(tuple(Action.parse(cell) for cell in row if cell.strip()) for row in rows)
        num_microbatches = max((action.microbatch for action in chain(*stages)), default=0) + 1
        return cls(stages, num_microbatches, num_microbatches if slots is None else slots)

    def csv(self) -> str:
        """Returns the schedule as text that `parse` reads."""
        return "\n".join(",".join(map(str, actions)) for actions in self.stages)

    def __str__(self) -> str:
        """Draws forwards and backwards on a time axis of ticks, as in `fill_drain`."""
        ends = self.times()
        rows = [{int(ends[a]) - 1: str(a) for a in actions if tick(a)} for actions in self.stages]
        width = max(len(cell) for row in rows for cell in row.values())
        label = len(f"stage {self.num_stages - 1}  ")
        cells = [[row.get(now, ".").center(width) for now in range(max(row) + 1)] for row in rows]
        return "\n".join(f"stage {i}".ljust(label) + " ".join(row).rstrip() for i, row in enumerate(cells))

    @property
    def num_stages(self) -> int:
        """The number of stages, K."""
        return len(self.stages)

    def order(self) -> tuple[Action, ...]:
        """Returns all actions in schedule order: each follows everything that it waits for.

        The order is by tick. Within a tick come the forwards from the first stage on, then the backwards from
        the last, each with its transfers. For fill-drain this is torchgpipe's clock order, 0F0 0F1 1F0, and
        its mirror image, 2B3 2B2 1B3.
        """
        return tuple(self._actions[i] for i in self._order)

    def forward_part(self) -> Schedule:
        """Returns the forwards, to run before the loss.

        Raises:
            ValueError: there are no forwards, or a forward follows a backward.
        """
        return self._part(backward=False)

    def backward_part(self) -> Schedule:
        """Returns the backwards, to run after the loss.

        Raises:
            ValueError: there are no backwards, or a forward follows a backward.
        """
        return self._part(backward=True)

    def times(self, seconds: Callable[[Action], float] = tick) -> dict[Action, float]:
        """Returns the time at which each action ends, from 0, if a running action takes ``seconds``."""
        return dict(zip(self._actions, self._ends(seconds, self._waits(self.slots)), strict=True))

    def critical_path(self, seconds: Callable[[Action], float] = tick) -> float:
        """Returns the minimum time that the schedule takes, until its last action ends."""
        return max(self._ends(seconds, self._waits(self.slots)))

    def slots_needed(self, seconds: Callable[[Action], float] = tick) -> int:
        """Returns the minimum number of slots with which no SEND waits, if an action takes ``seconds``."""
        ends = self._ends(seconds, self._waits(self.num_microbatches))
        most = 1
        for sends, receives in self._transfers():
            received = [ends[i] for i in receives]
            for sent, i in enumerate(sends):
                begin = ends[i - 1]  # a SEND is never the first of its stage, and here waits for no slot
                most = max(most, sent + 1 - bisect_right(received, begin))
        return most

    def _part(self, *, backward: bool) -> Schedule:
        for before, after in chain(*map(pairwise, self.stages)):
            if before.kind in BACKWARD and after.kind not in BACKWARD:
                raise ValueError(f"{after} comes after {before}, so the loss cannot come in between")
        stages = tuple(tuple(a for a in row if (a.kind in BACKWARD) == backward) for row in self.stages)
        if not any(stages):
            raise ValueError(f"the schedule has no {'backwards' if backward else 'forwards'}")
        return Schedule(stages, self.num_microbatches, self.slots)

    # The methods below represent an action by its index in _actions.

    @cached_property
    def _actions(self) -> list[Action]:
        return list(chain(*self.stages))

    def _transfers(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yields the SENDs and the RECVs of every connection and direction, in the order of their stages."""
        found: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)
        for i, action in enumerate(self._actions):
            found[action.stage, action.kind].append(i)
        for stage in range(self.num_stages):
            yield found[stage, Kind.SEND_F], found[stage + 1, Kind.RECV_F]
            yield found[stage, Kind.SEND_B], found[stage - 1, Kind.RECV_B]

    def _waits(self, slots: int) -> list[int]:
        """Returns the action for which each action waits, besides the one before it in its stage, or -1."""
        waits = [-1] * len(self._actions)
        for sends, receives in self._transfers():
            for send, receive in zip(sends, receives, strict=True):
                waits[receive] = send
            for send, receive in zip(sends[slots:], receives, strict=False):
                waits[send] = receive
        return waits

    @cached_property
    def _order(self) -> list[int]:
        """The schedule order: among the actions that are ready, the first by `_key` comes next."""
        waits = self._waits(self.slots)
        following = list(accumulate(map(len, self.stages), initial=0))  # the next action of each stage
        limits = following[1:]
        free = [0.0] * self.num_stages  # the tick at which each stage is free
        ends = {-1: 0.0}  # the other keys are in schedule order
        ready: list[tuple[float, bool, int, int]] = []  # at most one action of a stage
        idle = set(range(self.num_stages))  # the stages without a ready action

        def check_ready(stage: int) -> None:
            i = following[stage]
            if stage in idle and i < limits[stage] and waits[i] in ends:
                free[stage] = max(free[stage], ends[waits[i]])
                heappush(ready, self._key(i, free[stage]))
                idle.remove(stage)

        for stage in range(self.num_stages):
            check_ready(stage)
        while ready:
            i = heappop(ready)[-1]
            stage = self._actions[i].stage
            ends[i] = free[stage] = free[stage] + tick(self._actions[i])
            following[stage] += 1
            idle.add(stage)
            for near in range(max(stage - 1, 0), min(stage + 2, self.num_stages)):
                check_ready(near)
        stuck = [i for i, limit in zip(following, limits, strict=False) if i < limit]
        if stuck:
            names = (f"{self._actions[i]} waits for {self._actions[waits[i]]}" for i in stuck)
            raise ValueError(f"deadlock with {self.slots} slots: {', '.join(names)}")
        return list(ends)[1:]

    def _key(self, i: int, begin: float) -> tuple[float, bool, int, int]:
        """Returns the sort key: tick, direction and stage. A SEND has the tick of the action before it."""
        action = self._actions[i]
        backward = action.kind in BACKWARD
        begin -= action.kind in (Kind.SEND_F, Kind.SEND_B)
        return (begin, backward, -action.stage if backward else action.stage, i)

    def _ends(self, seconds: Callable[[Action], float], waits: list[int]) -> list[float]:
        ends = [0.0] * (len(self._actions) + 1)  # the last element, at index -1, stays 0
        free = [0.0] * self.num_stages
        for i in self._order:
            action = self._actions[i]
            ends[i] = free[action.stage] = max(free[action.stage], ends[waits[i]]) + seconds(action)
        return ends[:-1]


def _check_stage(
    stage: int,
    actions: Sequence[Action],
    num_stages: int,
    num_microbatches: int,
    forward: bool,
    backward: bool,
) -> None:
    """Raises unless a stage has one forward, one backward, or both, of every micro-batch, in order."""
    found: dict[int, list[Action]] = {m: [] for m in range(num_microbatches)}
    for action in actions:
        if action.microbatch not in found:
            raise ValueError(f"{action} belongs to none of the {num_microbatches} micro-batches")
        found[action.microbatch].append(action)
    for microbatch, own in found.items():
        parts = {action.kind for action in own}
        split = not parts.isdisjoint({Kind.I, Kind.W})
        kinds = forward_steps(stage, num_stages) * forward
        kinds += backward_steps(stage, num_stages, recompute=Kind.R in parts, split=split) * backward
        needed = [Action(stage, kind, microbatch) for kind in kinds]
        if own != needed:
            names = " ".join(map(str, own)) or "nothing"
            raise ValueError(f"stage {stage} does {names}, where it has to do {' '.join(map(str, needed))}")
