"""Schedules: the actions of every rank, which are validated, ordered, timed and drawn."""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import StringIO
from itertools import accumulate, chain, pairwise, zip_longest

from gpipe_fast.schedule.actions import (
    BACKWARD,
    COMPUTE,
    RECEIVES,
    TRANSFERS,
    Action,
    Kind,
    Recomputed,
    backward_steps,
    forward_steps,
    parse_cell,
    tick,
    with_transfers,
)


def _no_time(action: Action) -> float:
    return 0.0


def _none(action: Action) -> bool:
    return False


def _each_after(neighbours: Sequence[Sequence[int]], starts: Iterable[int]) -> list[int]:
    """Returns the nodes that are reached from each start in turn, each after its neighbours."""
    found: dict[int, None] = {}
    for start in starts:
        path = [start]
        while path:
            missing = [j for j in neighbours[path[-1]] if j not in found]
            path.extend(missing)
            if not missing:
                found.setdefault(path.pop())
    return list(found)


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in the order in which it runs them. Every instance is valid.

    A rank runs one stage, or several in turn. A schedule has forwards, backwards or both, of every
    micro-batch on every stage; a backward is a B, or an I and a W, and an R may precede it. A RECV waits for
    its SEND. A SEND waits while all slots of its connection are taken; a slot is taken from the end of a SEND
    to the end of its RECV.

    Attributes:
        ranks: actions by rank.
        num_microbatches: M.
        slots: boundary tensors that may wait on a connection, in one direction.

    Raises:
        ValueError: a stage lacks or misplaces an action or has two ranks, a connection reorders tensors, or a
            deadlock exists. The message ends with a drawing in which the action is marked.
    """

    ranks: tuple[tuple[Action, ...], ...]
    num_microbatches: int
    slots: int

    def __post_init__(self) -> None:
        for name in ("num_microbatches", "num_stages", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        backward = any(action.kind in BACKWARD for action in self._actions)
        forward = not backward or any(action.kind not in BACKWARD for action in self._actions)
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                if self.rank_of[action.stage] != rank:
                    raise self._fault(f"stage {action.stage} runs on two ranks", action)
        for stage, actions in enumerate(self.stages):
            self._check_stage(stage, actions, forward, backward)
        for i, j in chain(*(zip(*pair, strict=True) for pair in self._transfers())):
            send, receive = self._actions[i], self._actions[j]
            if send.microbatch != receive.microbatch:
                raise self._fault(
                    f"{receive} would receive from {send}, but a connection keeps its order", receive
                )
        self._ends(tick, self._waits(self.slots))  # raises if there is a deadlock

    @classmethod
    def of(
        cls,
        ranks: Iterable[Iterable[Action]],
        num_microbatches: int | None = None,
        *,
        slots: int | None = None,
        recomputed: Recomputed | None = None,
    ) -> Schedule:
        """Returns a schedule of forwards and backwards, and adds the transfers.

        Args:
            ranks: for each rank, its F, B, I and W in order; other actions are left out.
            num_microbatches: M; None for as many as occur.
            slots: boundary tensors that may wait on a connection, in one direction; None means M.
            recomputed: the micro-batches that recompute; a pair of a stage and a micro-batch does so on this
                stage only. If given, an R comes before a backward receives its boundary gradient, and a B
                that sends one is split into an I and a W, so that no action waits for a tensor that it does
                not need.

        Raises:
            ValueError: the schedule is invalid.
        """
        rows = [[action for action in row if action.kind in COMPUTE] for row in ranks]
        if num_microbatches is None:
            num_microbatches = max((action.microbatch for action in chain(*rows)), default=0) + 1
        last = max((action.stage for action in chain(*rows)), default=-1)
        parts = recomputed is not None, frozenset(recomputed or ())
        full = tuple(tuple(chain(*(with_transfers(a, last, *parts) for a in row))) for row in rows)
        return cls(full, num_microbatches, num_microbatches if slots is None else slots)

    @classmethod
    def parse(cls, text: str, *, slots: int | None = None) -> Schedule:
        """Parses one row of comma-separated actions per rank; ignores blanks. ``slots`` defaults to M.

        Raises:
            ValueError: a cell is not an action, or the schedule is invalid.
        """
        rows = [row.split(",") for row in text.splitlines() if row.strip()]
        ranks = tuple(tuple(Action.parse(cell) for cell in row if cell.strip()) for row in rows)
        num_microbatches = max((action.microbatch for action in chain(*ranks)), default=0) + 1
        return cls(ranks, num_microbatches, num_microbatches if slots is None else slots)

    @classmethod
    def from_csv(cls, text: str) -> Schedule:
        """Parses a CSV of ``torch.distributed.pipelining``, as its ``_dump_csv`` writes it.

        Both of its dialects are read, ``compute_only`` and ``compute_comms``. Transfers are set anew, as by
        `of`; actions of FSDP are left out; and actions that overlap run one after another.

        Raises:
            ValueError: a cell is not an action, or the schedule is invalid.
        """
        rows = [[cell.strip() for cell in row] for row in csv.reader(StringIO(text))]
        return cls.of([action for cell in row for action in parse_cell(cell)] for row in rows if any(row))

    def csv(self) -> str:
        """Returns the schedule as text that `parse` reads, in the dialect ``compute_comms``.

        ``torch.distributed.pipelining`` reads it if there is no R.
        """
        return "\n".join(",".join(map(str, actions)) for actions in self.ranks)

    def __str__(self) -> str:
        """Draws forwards and backwards on a time axis of ticks, as in `fill_drain`."""
        ends = self.times()
        rows = [{int(ends[a]) - 1: str(a) for a in actions if tick(a)} for actions in self.ranks]
        width = max(len(cell) for row in rows for cell in row.values())
        name = "stage" if self.ranks == self.stages else "rank"
        label = len(f"{name} {len(rows) - 1}  ")
        cells = [[row.get(now, ".").center(width) for now in range(max(row) + 1)] for row in rows]
        return "\n".join(f"{name} {i}".ljust(label) + " ".join(row).rstrip() for i, row in enumerate(cells))

    @cached_property
    def stages(self) -> tuple[tuple[Action, ...], ...]:
        """Actions by stage."""
        found: list[list[Action]] = [[] for _ in range(self.num_stages)]
        for action in self._actions:
            found[action.stage].append(action)
        return tuple(map(tuple, found))

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage."""
        found: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                found.setdefault(action.stage, rank)
        return found

    @property
    def defers_weights(self) -> bool:
        """Whether a stage computes anything between an I and its W."""
        for actions in self.stages:
            computed = [action for action in actions if action.kind in COMPUTE]
            for before, action in pairwise(computed):
                if action.kind is Kind.W and before != Action(action.stage, Kind.I, action.microbatch):
                    return True
        return False

    @cached_property
    def num_stages(self) -> int:
        """The number of stages, K."""
        return max((action.stage for action in self._actions), default=-1) + 1

    def order(self) -> tuple[Action, ...]:
        """Returns all actions in schedule order: each follows everything that it waits for.

        The order is by tick. Within a tick come the forwards from the first stage on, then the backwards from
        the last, each with its transfers. For fill-drain this is torchgpipe's clock order, 0F0 0F1 1F0, and
        its mirror image, 2B3 2B2 1B3.
        """
        return tuple(self._actions[i] for i in self._order)

    def order_around(
        self, stage: int, early: Callable[[Action], bool], late: Callable[[Action], bool] = _none
    ) -> tuple[Action, ...]:
        """Returns all actions in an order that the waits allow, with those of other stages early or late.

        Args:
            stage: the stage.
            early: whether an action of another stage, with all that it waits for, comes as soon as this stage
                lets it; others come when an action of this stage or an early one waits for them.
            late: whether an action of another stage comes only when an action of this stage waits for it. An
                early action that waits for a late one follows it.
        """
        before = self._before()
        after: list[list[int]] = [[] for _ in self._actions]
        for i, waited in enumerate(before):
            for j in waited:
                after[j].append(i)
        every = range(len(self._actions))
        own = [i for i in every if self._actions[i].stage == stage]
        # A late action waits for the action of this stage that it follows if all are late. That order has all
        # of these waits already, so they make no cycle.
        latest = -1
        for i in _each_after(before, own):
            if self._actions[i].stage == stage:
                latest = i
            elif late(self._actions[i]) and latest >= 0:
                before[i].append(latest)
                after[latest].append(i)
        earliest = reversed(_each_after(after, chain(reversed(own), every)))
        chosen = (i for i in earliest if self._actions[i].stage == stage or early(self._actions[i]))
        return tuple(self._actions[i] for i in _each_after(before, chain(chosen, every)))

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

    def times(
        self, seconds: Callable[[Action], float] = tick, transit: Callable[[Action], float] = _no_time
    ) -> dict[Action, float]:
        """Returns the time at which each action ends, from 0.

        Args:
            seconds: the time that an action takes its rank.
            transit: the time from the end of a SEND to the arrival of its tensor; it takes no rank's time.
        """
        return dict(zip(self._actions, self._ends(seconds, self._waits(self.slots), transit), strict=True))

    def waits(self) -> dict[Action, Action]:
        """Returns the action for which each action waits, besides the one before it in its rank, if any."""
        pairs = zip(self._actions, self._waits(self.slots), strict=True)
        return {action: self._actions[i] for action, i in pairs if i >= 0}

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

    def with_fewer_slots(self, slots: int) -> Schedule:
        """Returns the schedule with at most so many slots, but as many as `slots_needed`."""
        return replace(self, slots=min(self.slots, max(slots, self.slots_needed())))

    def _part(self, *, backward: bool) -> Schedule:
        for before, after in chain(*map(pairwise, self.ranks)):
            if before.kind in BACKWARD and after.kind not in BACKWARD:
                raise ValueError(f"{after} comes after {before}, so the loss cannot come in between")
        ranks = tuple(tuple(a for a in row if (a.kind in BACKWARD) == backward) for row in self.ranks)
        if not any(ranks):
            raise ValueError(f"the schedule has no {'backwards' if backward else 'forwards'}")
        return Schedule(ranks, self.num_microbatches, self.slots)

    # The methods below represent an action by its index in _actions.

    @cached_property
    def _actions(self) -> list[Action]:
        return list(chain(*self.ranks))

    def _transfers(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yields the SENDs and the RECVs of every connection and direction, in the order of their stages."""
        found: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)
        for i, (stage, kind, _) in enumerate(self._actions):
            if kind in TRANSFERS:
                found[stage, kind].append(i)
        for stage in range(self.num_stages):
            yield found[stage, Kind.SEND_F], found[stage + 1, Kind.RECV_F]
            yield found[stage, Kind.SEND_B], found[stage - 1, Kind.RECV_B]

    def _waits(self, slots: int) -> list[int]:
        """Returns the action for which each action waits, besides the one before it in its rank, or -1."""
        waits = [-1] * len(self._actions)
        for sends, receives in self._transfers():
            for send, receive in zip(sends, receives, strict=True):
                waits[receive] = send
            for send, receive in zip(sends[slots:], receives, strict=False):
                waits[send] = receive
        return waits

    @cached_property
    def _order(self) -> list[int]:
        """The schedule order: by tick, direction and stage. A SEND has the tick of the action before it."""
        ends = self._ends(tick, self._waits(self.slots))

        def key(i: int) -> tuple[float, bool, int, int]:
            action = self._actions[i]
            begin = ends[i] - tick(action) - (action.kind in (Kind.SEND_F, Kind.SEND_B))
            backward = action.kind in BACKWARD
            return begin, backward, -action.stage if backward else action.stage, i

        return _each_after(self._before(), sorted(range(len(ends)), key=key))

    def _before(self) -> list[list[int]]:
        """Returns, for each action, those that have to come before it, of its rank and of others."""
        firsts = set(accumulate(map(len, self.ranks), initial=0))
        waits = enumerate(self._waits(self.slots))
        return [[j for j in (waited, -1 if i in firsts else i - 1) if j >= 0] for i, waited in waits]

    def _ends(
        self,
        seconds: Callable[[Action], float],
        waits: list[int],
        transit: Callable[[Action], float] = _no_time,
    ) -> list[float]:
        """Returns the time at which each action ends; raises if there is a deadlock."""
        actions = self._actions
        ends = [-1.0] * len(actions) + [0.0]  # -1: not yet; the last one, at index -1, stays 0
        following = list(accumulate(map(len, self.ranks), initial=0))  # the next action of each rank
        limits = following[1:]
        free = [0.0] * len(self.ranks)
        ended, before = 0, -1
        while ended > before:  # each rank runs until it waits, from the first to the last, and back
            for rank in (*range(len(limits)), *reversed(range(len(limits)))):
                i, now = following[rank], free[rank]
                while i < limits[rank] and ends[waits[i]] >= 0:
                    ready, action = ends[waits[i]], actions[i]
                    if action.kind in RECEIVES:
                        ready += transit(actions[waits[i]])
                    now = ends[i] = max(now, ready) + seconds(action)
                    i += 1
                following[rank], free[rank] = i, now
            ended, before = sum(following), ended
        stuck = [i for i, limit in zip(following, limits, strict=False) if i < limit]
        if stuck:
            names = (f"{actions[i]} waits for {actions[waits[i]]}" for i in stuck)
            raise self._fault(
                f"deadlock with {self.slots} slots: {', '.join(names)}", *(actions[i] for i in stuck)
            )
        del ends[-1]
        return ends

    def _check_stage(self, stage: int, actions: Sequence[Action], forward: bool, backward: bool) -> None:
        """Raises unless a stage has one forward, one backward, or both, of every micro-batch, in order."""
        found: dict[int, list[Kind]] = {m: [] for m in range(self.num_microbatches)}
        for action in actions:
            if action.microbatch not in found:
                raise self._fault(
                    f"{action} belongs to none of the {self.num_microbatches} micro-batches", action
                )
            found[action.microbatch].append(action.kind)
        correct: list[Kind] | None = None  # as those of the last micro-batch, since most are alike
        for microbatch, kinds in found.items():
            if kinds == correct:
                continue
            split = Kind.I in kinds or Kind.W in kinds
            recompute = Kind.R in kinds
            correct = forward_steps(stage, self.num_stages) * forward
            correct += backward_steps(stage, self.num_stages, recompute=recompute, split=split) * backward
            if kinds != correct:
                own, needed = (
                    [Action(stage, kind, microbatch) for kind in each] for each in (kinds, correct)
                )
                names = " ".join(map(str, own)) or "nothing"
                different = [a for a, b in zip_longest(own, needed) if a != b]
                raise self._fault(
                    f"stage {stage} does {names}, where it has to do {' '.join(map(str, needed))}",
                    *[action for action in different[:1] if action is not None],
                )

    def _fault(self, message: str, *actions: Action) -> ValueError:
        """Returns an error whose message ends with a drawing in which actions are marked."""
        if not actions:
            return ValueError(message)
        lines = [message]
        for rank, row in enumerate(self.ranks):
            at = next((i for i, action in enumerate(row) if action in actions), None)
            begin = max(0, (at or 0) - _NUM_AROUND)
            shown = row[begin : begin + 2 * _NUM_AROUND + 1]
            cells = [f">{action}<" if begin + i == at else str(action) for i, action in enumerate(shown)]
            dots = ["..."] * (begin > 0), ["..."] * (begin + len(shown) < len(row))
            lines.append(" ".join([f"rank {rank} ", *dots[0], *cells, *dots[1]]))
        return ValueError("\n".join(lines))


# The number of actions that an error's drawing shows before and after the marked one.
_NUM_AROUND = 4
