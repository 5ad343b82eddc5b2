"""Random schedules that a pipeline can run: valid by construction, any micro-batch in any order.

Of what ``Schedule`` allows, one thing a pipeline cannot do: a stage that has begun a backward with R, or has
done its I, ends it before it begins another.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from gpipe_fast.schedule import Action, Kind, Schedule

Edge = list[int]  # the micro-batches that wait on it


class _Forward:
    """What a stage may do next in its forward."""

    def __init__(self, stage: int, num_stages: int, num_microbatches: int) -> None:
        self.stage, self.last = stage, stage == num_stages - 1
        self.arrived = list(range(num_microbatches)) if stage == 0 else []
        self.made: list[int] = []

    def choices(self, before: Edge, after: Edge, slots: int) -> Iterator[tuple[Kind, int]]:
        yield from ((Kind.RECV_F, m) for m in before[:1])
        yield from ((Kind.F, m) for m in self.arrived)
        if len(after) < slots:
            yield from ((Kind.SEND_F, m) for m in self.made)

    def do(self, kind: Kind, m: int, before: Edge, after: Edge) -> None:
        if kind is Kind.RECV_F:
            self.arrived.append(before.pop(0))
        elif kind is Kind.F:
            self.arrived.remove(m)
            self.made += [] if self.last else [m]
        else:
            self.made.remove(m)
            after.append(m)


class _Backward:
    """The same in its backward."""

    def __init__(self, stage: int, num_stages: int, num_microbatches: int) -> None:
        self.stage, self.first, self.last = stage, stage == 0, stage == num_stages - 1
        self.away = [] if self.last else list(range(num_microbatches))  # whose gradients have not come
        self.arrived = list(range(num_microbatches)) if self.last else []
        self.made: list[int] = []  # to be sent
        self.open: int | None = None  # begun and not ended
        self.split = False  # of that, I is done

    def choices(self, before: Edge, after: Edge, slots: int) -> Iterator[tuple[Kind, int]]:
        yield from ((Kind.RECV_B, m) for m in before[:1])
        if len(after) < slots:
            yield from ((Kind.SEND_B, m) for m in self.made)
        if self.open is None:
            yield from ((Kind.R, m) for m in (self.arrived if self.last else self.away))
        if self.split:
            assert self.open is not None
            if self.first or self.open not in self.made:
                yield Kind.W, self.open
            return
        for m in self.arrived:
            if self.open in (None, m):
                yield Kind.B, m
                yield Kind.I, m

    def do(self, kind: Kind, m: int, before: Edge, after: Edge) -> None:
        if kind is Kind.RECV_B:
            self.arrived.append(before.pop(0))
            self.away.remove(m)
        elif kind is Kind.SEND_B:
            self.made.remove(m)
            after.append(m)
        elif kind is Kind.R:
            self.open = m
        elif kind is Kind.W:
            self.open, self.split = None, False
        else:
            self.arrived.remove(m)
            self.made += [] if self.first else [m]
            self.open, self.split = (m, True) if kind is Kind.I else (None, False)


def random_schedule(generator: random.Random, num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards: the loss comes in between."""
    slots = generator.randint(1, num_microbatches)
    rows: list[list[Action]] = [[] for _ in range(num_stages)]
    for kind_of_stage, step in ((_Forward, 1), (_Backward, -1)):
        stages = [kind_of_stage(i, num_stages, num_microbatches) for i in range(num_stages)]
        edges: list[Edge] = [[] for _ in range(num_stages + 2)]  # out of each stage, and two at the ends
        # Stages that are slow and stages that are fast.
        haste = [generator.choice((1, 1, 4, 16)) for _ in stages]
        while True:
            around = [(edges[s.stage - step], edges[s.stage]) for s in stages]
            ready = [(s, list(s.choices(*around[s.stage], slots))) for s in stages]
            ready = [(s, choices) for s, choices in ready if choices]
            if not ready:
                break
            (stage, choices), *_ = generator.choices(ready, [haste[s.stage] for s, _ in ready])
            kind, m = generator.choice(choices)
            stage.do(kind, m, *around[stage.stage])
            rows[stage.stage].append(Action(stage.stage, kind, m))
    return Schedule(tuple(map(tuple, rows)), num_microbatches, slots)


def order_of(schedule: Schedule, stage: int, *kinds: Kind) -> list[int]:
    """The micro-batches of a stage's actions of some kinds, in order."""
    return [action.microbatch for action in schedule.stages[stage] if action.kind in kinds]
