"""Random schedules that a pipeline can run: valid by construction, micro-batches in any order.

A pipeline has one restriction that ``Schedule`` does not check: a stage that has run R or I of a micro-batch
must finish that backward before it begins another.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from gpipe_fast.schedule import Action, Kind, Schedule

InFlight = list[int]  # micro-batches that are sent and not received, on one connection


class _Forward:
    """A stage's state in the forward, and the actions that may come next."""

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
    """A stage's state in the backward, and the actions that may come next."""

    def __init__(self, stage: int, num_stages: int, num_microbatches: int) -> None:
        self.stage, self.first, self.last = stage, stage == 0, stage == num_stages - 1
        # Micro-batches whose gradients have not arrived.
        self.awaited = [] if self.last else list(range(num_microbatches))
        self.arrived = list(range(num_microbatches)) if self.last else []
        self.unsent: list[int] = []  # their gradients are computed and not sent
        self.begun: int | None = None  # the micro-batch whose backward is begun and not finished
        self.input_gradient_done = False  # whether I of that micro-batch is done

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
    """Returns a schedule with all forwards before all backwards, since the loss is computed in between."""
    slots = generator.randint(1, num_microbatches)
    rows: list[list[Action]] = [[] for _ in range(num_stages)]
    for kind_of_stage, step in ((_Forward, 1), (_Backward, -1)):
        stages = [kind_of_stage(i, num_stages, num_microbatches) for i in range(num_stages)]
        in_flight: list[InFlight] = [[] for _ in range(num_stages + 2)]  # by sending stage; two unused
        # Random speeds make some stages slow and others fast.
        weights = [generator.choice((1, 1, 4, 16)) for _ in stages]
        while True:
            adjacent = [(in_flight[s.stage - step], in_flight[s.stage]) for s in stages]
            ready = [(s, list(s.choices(*adjacent[s.stage], slots))) for s in stages]
            ready = [(s, choices) for s, choices in ready if choices]
            if not ready:
                break
            (stage, choices), *_ = generator.choices(ready, [weights[s.stage] for s, _ in ready])
            kind, m = generator.choice(choices)
            stage.apply(kind, m, *adjacent[stage.stage])
            rows[stage.stage].append(Action(stage.stage, kind, m))
    return Schedule(tuple(map(tuple, rows)), num_microbatches, slots)


def order_of(schedule: Schedule, stage: int, *kinds: Kind) -> list[int]:
    """Returns the micro-batches of a stage's actions of these kinds, in order."""
    return [action.microbatch for action in schedule.stages[stage] if action.kind in kinds]
