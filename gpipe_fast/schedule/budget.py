"""The least recomputation that fits into a number of bytes, for each stage and micro-batch.

A stage has a ladder of rungs, from saving nothing of a micro-batch to saving all that its backward reads
(see gpipe_fast/lower/ladder.py). In this module a stage climbs its ladder in small steps: one more rung for
one class of micro-batches. Micro-batches that are kept at different times are in one class, because these
share the bytes::

    4 micro-batches, of which the stage keeps 2 at a time      step   m0  m1  m2  m3
                                                                  0    0   0   0   0   rung of each
                                                                  1    0   1   0   1
                                                                  2    1   1   1   1
                                                                  3    1   2   1   2

More steps never keep less, and never recompute more, so a step of the schedule never takes longer. Within a
budget, every stage climbs as far as it can: with more bytes, no plan is slower. In which order the classes
climb is tried out by simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from math import ceil, floor
from typing import Any, NamedTuple

from gpipe_fast.schedule.actions import COMPUTE, Action, Kind
from gpipe_fast.schedule.memory import Changes, keeps, moments, peak_of
from gpipe_fast.schedule.schedule import Schedule
from gpipe_fast.schedule.simulation import Simulation


@dataclass(frozen=True)
class Rung:
    """One choice of what a stage saves of a micro-batch.

    Attributes:
        saved: the bytes that are saved besides the boundary inputs.
        recompute: the time of the recomputation.
        scratch: the bytes that the programs need in addition while they run.
    """

    saved: float
    recompute: float
    scratch: float = 0.0


@dataclass(frozen=True)
class StageCosts:
    """What a stage costs.

    Attributes:
        forward: the time of the forward of a whole micro-batch.
        backward: the time of its backward without recomputation.
        rungs: the ladder: ``saved`` never falls, ``recompute`` never rises.
        boundary: the bytes of the boundary inputs of a micro-batch, which are kept on each rung.
        fixed: what the stage takes besides, in bytes, by name: its parameters and so on.
        device: the stages of a device share its budget.
        outputs: the bytes of the boundary outputs of a micro-batch.
        scratch_stays: whether the scratch memory stays between runs; else it is there during backwards only.
    """

    forward: float
    backward: float
    rungs: tuple[Rung, ...]
    boundary: float
    fixed: Mapping[str, float]
    device: Hashable
    outputs: float = 0.0
    scratch_stays: bool = True


@dataclass(frozen=True)
class Climb:
    """Rungs for all stages and micro-batches.

    Attributes:
        rungs: for each stage, the rung of each micro-batch, as an index.
        time: the simulated time of a step.
        bytes: what each stage needs at most.
    """

    rungs: tuple[tuple[int, ...], ...]
    time: float
    bytes: tuple[float, ...]


# A stage, the rung that it takes, and for which micro-batches.
_Step = tuple[int, int, list[int]]

# The name of the boundary tensors that wait to be sent or used, among the fixed costs of a stage.
UNDER_WAY = "boundary tensors under way"
# The maximum number of classes of a stage; if more micro-batches are kept at a time, a class has several.
_MAX_CLASSES = 8


class _Way(NamedTuple):
    """In which order the classes of a stage climb.

    Attributes:
        by_class: whether a class climbs to the top before the next one begins.
        last_first: whether the class of the last micro-batch climbs first: in all stages but the last, and in
            the last stage.
    """

    by_class: bool
    last_first: tuple[bool, bool]


_WAYS = [_Way(a, (b, c)) for a, b, c in product((False, True), repeat=3)]


class BudgetError(ValueError):
    """A budget that cannot be met.

    Attributes:
        balance: the partition that needs least, if partitions were compared; else empty.
    """

    balance: tuple[int, ...] = ()


class Budget:
    """Chooses rungs for one schedule.

    Args:
        costs: those of each stage.
        sizes: the size of each micro-batch, relative to a whole one.
        schedule_of: returns the schedule, given the pairs of stage and micro-batch that recompute.
    """

    def __init__(
        self,
        costs: Sequence[StageCosts],
        sizes: Sequence[float],
        schedule_of: Callable[[frozenset[tuple[int, int]]], Schedule],
    ) -> None:
        self.costs, self.sizes, self._schedule_of = costs, sizes, schedule_of
        everything = schedule_of(frozenset(product(range(len(costs)), range(len(sizes)))))
        computed = ([action for action in row if action.kind in COMPUTE] for row in everything.stages)
        self._moments = [moments(actions, stage) for stage, actions in enumerate(computed)]
        self._changes = cache(self._changes_of)  # of few rungs and sizes, in many choices
        self._known_bytes: dict[tuple[int, tuple[int, ...]], float] = {}
        # For each stage, the classes of micro-batches.
        self._classes = [
            [
                [m for m in range(len(sizes)) if first <= m % kept < first + -(-kept // _MAX_CLASSES)]
                for first in range(0, kept, -(-kept // _MAX_CLASSES))
            ]
            for kept in Simulation.of(everything).kept
        ]

    def choose(self, limits: Mapping[Any, float]) -> Climb:
        """Returns the fastest rungs that fit.

        Args:
            limits: the bytes of each device.

        Raises:
            BudgetError: even a recomputation of everything needs more; the message says how much, for what.
        """
        self._check(limits)
        return min((self._climb(limits, way) for way in _WAYS), key=lambda climb: climb.time)

    def least(self) -> list[float]:
        """Returns the bytes that each stage needs at least."""
        return [self._bytes(stage, [0] * len(self.sizes)) for stage in range(len(self.costs))]

    def time_of(self, rungs: Sequence[Sequence[int]]) -> float:
        """Returns the simulated time of a step, given the rung of each micro-batch in each stage."""
        costs, sizes = self.costs, self.sizes
        again = [[own.rungs[rung].recompute for rung in row] for own, row in zip(costs, rungs, strict=True)]
        pairs = ((stage, m) for stage, row in enumerate(again) for m, time in enumerate(row) if time)
        schedule = self._schedule_of(frozenset(pairs))
        has_recompute = {(a.stage, a.microbatch) for row in schedule.stages for a in row if a.kind is Kind.R}

        def seconds(action: Action) -> float:
            own, m = costs[action.stage], action.microbatch
            recompute = again[action.stage][m]
            if action.kind is Kind.F:
                time = own.forward
            elif action.kind is Kind.R:
                time = recompute
            elif action.kind in (Kind.B, Kind.I):
                time = own.backward / (1 if action.kind is Kind.B else 2)
                time += 0.0 if (action.stage, m) in has_recompute else recompute
            else:
                time = own.backward / 2 if action.kind is Kind.W else 0.0
            return time * sizes[m]

        return Simulation.of(schedule, seconds).time

    def _check(self, limits: Mapping[Any, float]) -> None:
        least = self.least()
        for device, limit in limits.items():
            stages = [stage for stage, own in enumerate(self.costs) if own.device == device]
            needed = sum(least[stage] for stage in stages)
            if needed <= limit:
                continue
            parts = "; ".join(self._describe(stage, least[stage]) for stage in stages)
            raise BudgetError(
                f"memory is {_mib(limit, floor)} on {device}, but at least {_mib(needed, ceil)} is needed if "
                f"everything is recomputed ({parts}); "
                "pass at least that, use more chunks, or a balance with fewer layers on this device"
            )

    def _describe(self, stage: int, needed: float) -> str:
        own = self.costs[stage]
        scratch = own.rungs[0].scratch
        boundary = needed - sum(own.fixed.values()) - scratch
        parts = {**own.fixed, "boundary tensors": boundary, "intermediates": scratch}
        texts = [f"{_mib(size)} of {name}" for name, size in parts.items() if size > 0]
        return f"stage {stage}: {', '.join(texts) or 'nothing'}"

    def _climb(self, limits: Mapping[Any, float], way: _Way) -> Climb:
        """Returns the rungs after as many steps as fit into the limits."""
        rungs = [[0] * len(self.sizes) for _ in self.costs]
        for device, limit in limits.items():
            own = [stage for stage, costs in enumerate(self.costs) if costs.device == device]
            for stage in own:
                rungs[stage] = [len(self.costs[stage].rungs) - 1] * len(self.sizes)
            needed = {stage: self._bytes(stage, rungs[stage]) for stage in own}
            # From the top, because a later step may need less: what is saved is not in the scratch memory.
            for stage, rung, microbatches in reversed(self._steps(own, way)):
                if sum(needed.values()) <= limit:
                    break
                for m in microbatches:
                    rungs[stage][m] = rung - 1
                needed[stage] = self._bytes(stage, rungs[stage])
        found = tuple(map(tuple, rungs))
        return Climb(
            found, self.time_of(found), tuple(self._bytes(stage, row) for stage, row in enumerate(found))
        )

    def _steps(self, stages: Sequence[int], way: _Way) -> list[_Step]:
        """Returns the steps of the stages of a device: first those that save most time for their bytes."""
        found: list[tuple[tuple[float, ...], _Step]] = []
        for stage in stages:
            is_last = stage == len(self.costs) - 1
            classes = self._classes[stage][:: -1 if way.last_first[is_last] else 1]
            gain = float("inf")
            for rung, (before, after) in enumerate(pairwise(self.costs[stage].rungs), 1):
                saved = after.saved - before.saved
                # Never before the rung below.
                gain = min(gain, (before.recompute - after.recompute) / saved) if saved else gain
                for number, own in enumerate(classes):
                    position = (number, 0) if way.by_class else (0, number)
                    found.append(((position[0], -gain, stage, rung, position[1]), (stage, rung, own)))
        return [step for _, step in sorted(found, key=lambda each: each[0])]

    def _bytes(self, stage: int, row: Sequence[int]) -> float:
        """Returns the bytes of a stage."""
        key, own = (stage, tuple(row)), self.costs[stage]
        if key not in self._known_bytes:
            staying = max(own.rungs[rung].scratch for rung in row) if own.scratch_stays else 0.0
            changes = [self._changes(stage, rung, size) for rung, size in zip(row, self.sizes, strict=True)]
            needed = staying + sum(peak_of(self._moments[stage], changes, {}).values())
            self._known_bytes[key] = sum(own.fixed.values()) + needed
        return self._known_bytes[key]

    def _changes_of(self, stage: int, rung: int, size: float) -> Changes:
        own = self.costs[stage]
        chosen = own.rungs[rung]
        running = 0.0 if own.scratch_stays else chosen.scratch
        return keeps((own.boundary + chosen.saved) * size, running=running)


def _mib(size: float, rounded: Callable[[float], int] = round) -> str:
    if size < 2**17:
        return f"{rounded(size):,} bytes"
    return f"{rounded(size / 2**20 * 10) / 10:.1f} MiB"
