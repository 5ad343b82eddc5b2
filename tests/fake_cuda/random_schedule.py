"""Random schedules that a pipeline can run: valid by construction, any micro-batch in any order.

Of what ``Schedule`` allows, one thing a pipeline cannot do: a stage that has begun a backward with R, or has
done its I, ends it before it begins another.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from gpipe_fast.schedule import Action, Kind, Schedule

InFlight = list[int]  # the micro-batches that wait on it


class _Forward:
    """What a stage may do next in its forward."""

    def __init__(self, stage: int, num_stages: int, num_microbatches: int) -> None:
        self.stage, self.last = stage, stage == num_stages - 1
        self.arrived = list(range(num_microbatches)) if stage == 0 else []
        self.unsent: list[int] = []

    def choices(self, incoming: InFlight, outgoing: InFlight, slots: int) -> Iterator[tuple[Kind, int]]:
        yield from ((Kind.RECV_F, m) for m in incoming[:1])
        yield from ((Kind.F, m) for m in self.arrived)
        if len(outgoing) < slots:
            yield from ((Kind.SEND_F, m) for m in self.unsent)

    def apply(self, kind: Kind, m: int, incoming: InFlight, outgoing: InFlight) -> None:
        if kind is Kind.RECV_F:
            self.arrived.append(incoming.pop(0))
        elif kind is Kind.F:
            self.arrived.remove(m)
            self.unsent += [] if self.last else [m]
        else:
            self.unsent.remove(m)
            outgoing.append(m)


class _Backward:
    """The same in its backward."""

    def __init__(self, stage: int, num_stages: int, num_microbatches: int) -> None:
        self.stage, self.first, self.last = stage, stage == 0, stage == num_stages - 1
        self.awaited = [] if self.last else list(range(num_microbatches))  # whose gradients have not come
        self.arrived = list(range(num_microbatches)) if self.last else []
        self.unsent: list[int] = []  # to be sent
        self.begun: int | None = None  # begun and not ended
        self.input_gradient_done = False  # of that, I is done

    def choices(self, incoming: InFlight, outgoing: InFlight, slots: int) -> Iterator[tuple[Kind, int]]:
        yield from ((Kind.RECV_B, m) for m in incoming[:1])
        if len(outgoing) < slots:
            yield from ((Kind.SEND_B, m) for m in self.unsent)
        if self.begun is None:
            yield from ((Kind.R, m) for m in (self.arrived if self.last else self.awaited))
        if self.input_gradient_done:
            assert self.begun is not None
            if self.first or self.begun not in self.unsent:
                yield Kind.W, self.begun
            return
        for m in self.arrived:
            if self.begun in (None, m):
                yield Kind.B, m
                yield Kind.I, m

    def apply(self, kind: Kind, m: int, incoming: InFlight, outgoing: InFlight) -> None:
        if kind is Kind.RECV_B:
            self.arrived.append(incoming.pop(0))
            self.awaited.remove(m)
        elif kind is Kind.SEND_B:
            self.unsent.remove(m)
            outgoing.append(m)
        elif kind is Kind.R:
            self.begun = m
        elif kind is Kind.W:
            self.begun, self.input_gradient_done = None, False
        else:
            self.arrived.remove(m)
            self.unsent += [] if self.first else [m]
            self.begun, self.input_gradient_done = (m, True) if kind is Kind.I else (None, False)


def random_schedule(generator: random.Random, num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards: the loss comes in between."""
    slots = generator.randint(1, num_microbatches)
    rows: list[list[Action]] = [[] for _ in range(num_stages)]
    for kind_of_stage, step in ((_Forward, 1), (_Backward, -1)):
        stages = [kind_of_stage(i, num_stages, num_microbatches) for i in range(num_stages)]
        edges: list[InFlight] = [[] for _ in range(num_stages + 2)]  # out of each stage, and two at the ends
        # Stages that are slow and stages that are fast.
        weights = [generator.choice((1, 1, 4, 16)) for _ in stages]
        while True:
            connections = [(edges[s.stage - step], edges[s.stage]) for s in stages]
            ready = [(s, list(s.choices(*connections[s.stage], slots))) for s in stages]
            ready = [(s, choices) for s, choices in ready if choices]
            if not ready:
                break
            (stage, choices), *_ = generator.choices(ready, [weights[s.stage] for s, _ in ready])
            kind, m = generator.choice(choices)
            stage.apply(kind, m, *connections[stage.stage])
            rows[stage.stage].append(Action(stage.stage, kind, m))
    return Schedule(tuple(map(tuple, rows)), num_microbatches, slots)


def order_of(schedule: Schedule, stage: int, *kinds: Kind) -> list[int]:
    """The micro-batches of a stage's actions of some kinds, in order."""
    return [action.microbatch for action in schedule.stages[stage] if action.kind in kinds]
