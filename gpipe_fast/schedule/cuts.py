"""Where to cut a sequence of layers, if each stage recomputes as little as its bytes allow.

Cuts and recomputation depend on each other: a stage with fewer layers has more room, and recomputes less. The
cuts are searched from the best bound on: a partition takes at least as long as its slowest stage works, and
the first stages fill and drain. Each partition is then simulated with the rungs of `Budget`, until no other
one can be faster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate, pairwise, product
from typing import Any

from gpipe_fast.schedule.actions import Kind
from gpipe_fast.schedule.budget import UNDER_WAY, Budget, BudgetError, Climb, Rung, StageCosts
from gpipe_fast.schedule.schedule import Schedule
from gpipe_fast.schedule.simulation import Simulation

# The maximum number of partitions that are simulated. With equal layers, many have nearly the same bound.
_MAX_SIMULATED = 200

# Returns what a stage of some layers costs, given its index; see `stage_costs`.
_CostsOf = Callable[[Sequence[StageCosts], int], StageCosts]


@dataclass(frozen=True)
class Partition:
    """A partition into stages.

    Attributes:
        balance: the number of layers of each stage.
        climb: the rungs of its stages, and the simulated time.
    """

    balance: tuple[int, ...]
    climb: Climb


def stage_costs(
    layers: Sequence[StageCosts], stage: int, devices: Sequence[Hashable], kept: Sequence[int], slots: int
) -> StageCosts:
    """Returns what a stage of these layers costs, given what each costs as a stage of its own.

    On the lowest rung, all is recomputed from the inputs of the stage; a layer that saves something keeps
    its inputs, too. What is recomputed is in the scratch memory, beside what the largest layer needs.

    Args:
        layers: the costs of the layers.
        stage: the index of the stage.
        devices: the device of each stage.
        kept: how many micro-batches each stage keeps at a time.
        slots: how many boundary tensors may wait on a connection, in one direction.
    """
    steps = []
    for number, layer in enumerate(layers):
        gain = float("inf")
        for rung, (before, after) in enumerate(pairwise(layer.rungs), 1):
            saved = after.saved - before.saved + (layer.boundary if number and rung == 1 else 0.0)
            time = before.recompute - after.recompute
            gain = min(gain, time / saved if saved else gain)
            steps.append((-gain, number, rung, saved, time))
    steps.sort()
    sums = [*accumulate((step[3] for step in steps), initial=0.0)]
    everything = sum(layer.rungs[0].recompute for layer in layers)
    times = [*accumulate((-step[4] for step in steps), initial=everything)]
    times[-1] = 0.0
    needed = max(layer.rungs[-1].scratch for layer in layers)
    rungs = tuple(Rung(s, t, sums[-1] - s + needed) for s, t in zip(sums, times, strict=True))
    fixed: dict[str, float] = {}
    for layer in layers:
        for name, size in layer.fixed.items():
            fixed[name] = fixed.get(name, 0.0) + size
    boundary, outputs = layers[0].boundary, layers[-1].outputs
    # The most that waits to be sent or used, however fast the stages next to this one are.
    sending, own, receiving = [0, *kept, 0][stage : stage + 3]
    arrived, left = min(slots, max(0, sending - own)) + 2, min(slots, receiving) + 2
    fixed[UNDER_WAY] = arrived * boundary + left * outputs
    return StageCosts(
        sum(x.forward for x in layers),
        sum(x.backward for x in layers),
        rungs,
        boundary,
        fixed,
        devices[stage],
        outputs,
        layers[0].scratch_stays,
    )


def best_partitions(
    layers: Sequence[StageCosts],
    devices: Sequence[Hashable],
    limits: Mapping[Any, float],
    sizes: Sequence[float],
    schedule_of: Callable[[frozenset[tuple[int, int]]], Schedule],
    count: int = 3,
) -> list[Partition]:
    """Returns the fastest partitions that fit, the fastest first.

    Args:
        layers: what each layer costs as a stage of its own.
        devices: the device of each stage.
        limits: the bytes of each device.
        sizes: the size of each micro-batch, relative to a whole one.
        schedule_of: as for `Budget`, for as many stages as there are devices.
        count: the maximum number of partitions.

    Raises:
        BudgetError: no partition fits; the message says what that which needs least consists of.
    """
    found: list[Partition] = []
    schedule = schedule_of(frozenset(product(range(len(devices)), range(len(sizes)))))
    kept = Simulation.of(schedule).kept
    costs_of = partial(stage_costs, devices=devices, kept=kept, slots=schedule.slots)
    splits = any(action.kind is Kind.I for row in schedule.stages for action in row)
    for number, (bound, balance) in enumerate(_by_bound(layers, limits, sizes, kept, splits, costs_of)):
        if number == _MAX_SIMULATED or (len(found) >= count and bound >= found[count - 1].climb.time):
            break
        with contextlib.suppress(BudgetError):
            budget = Budget(_stages(layers, balance, costs_of), sizes, schedule_of)
            found.append(Partition(balance, budget.choose(limits)))
        found.sort(key=lambda partition: partition.climb.time)
    if not found:
        balance = _smallest(layers, devices, sizes, kept, costs_of)
        try:
            budget = Budget(_stages(layers, balance, costs_of), sizes, schedule_of)
            found = [Partition(balance, budget.choose(limits))]
        except BudgetError as error:
            error.balance = balance
            raise
    return found[:count]


def _stages(layers: Sequence[StageCosts], balance: Sequence[int], costs_of: _CostsOf) -> list[StageCosts]:
    parts = [layers[end - size : end] for end, size in zip(accumulate(balance), balance, strict=True)]
    return [costs_of(part, stage) for stage, part in enumerate(parts)]


def _smallest(
    layers: Sequence[StageCosts],
    devices: Sequence[Hashable],
    sizes: Sequence[float],
    kept: Sequence[int],
    costs_of: _CostsOf,
) -> tuple[int, ...]:
    """Returns the partition that needs least if everything is recomputed: in all, or in its worst stage."""
    together = len(set(devices)) < len(devices)

    def needed(stage: int, begin: int, end: int) -> float:
        own = costs_of(layers[begin:end], stage)
        return sum(own.fixed.values()) + kept[stage] * own.boundary + own.rungs[0].scratch

    # By the number of layers so far: the least bytes, and the partition.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(len(devices)):
        ends = range(stage + 1, len(layers) - (len(devices) - stage - 1) + 1)
        best = {
            end: min(
                ((size + own) if together else max(size, own), (*balance, end - begin))
                for begin, (size, balance) in best.items()
                if begin < end
                for own in [needed(stage, begin, end)]
            )
            for end in ends
        }
    return best[len(layers)][1]


def _by_bound(
    layers: Sequence[StageCosts],
    limits: Mapping[Any, float],
    sizes: Sequence[float],
    kept: Sequence[int],
    splits: bool,
    costs_of: _CostsOf,
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yields partitions and bounds on their times, the least bound first; first those that may fit.

    A* search over the ends of stages: the bound of a beginning is that of its best continuation.

    Args:
        layers: as for `best_partitions`.
        limits: as for `best_partitions`.
        sizes: as for `best_partitions`.
        kept: how many micro-batches each stage keeps at a time.
        splits: whether weight gradients may be computed while earlier stages drain.
        costs_of: returns the costs of a stage of some layers.
    """
    num_layers, num_stages, total = len(layers), len(kept), sum(sizes)
    fill, drain = (
        [min(sizes) * time for time in accumulate(times, initial=0.0)]
        for times in ((x.forward for x in layers), (x.backward for x in layers))
    )
    bounds: dict[tuple[int, int, int], float] = {}

    def bound_of(stage: int, begin: int, end: int) -> float:
        """Returns the least time of a step with such a stage; infinite if it cannot fit."""
        key = stage, begin, end
        if key not in bounds:
            costs = costs_of(layers[begin:end], stage)
            room = limits[costs.device] - sum(costs.fixed.values())
            # Micro-batches that are kept one after the other have the room to themselves.
            rooms = -(-len(sizes) // kept[stage])
            each = rooms * room / (len(sizes) * min(sizes)) - costs.boundary
            backward = total * costs.backward
            after = max(backward, (backward + drain[begin]) / 2) if splits else backward + drain[begin]
            recompute = _least_recompute(costs.rungs, each)
            bounds[key] = fill[begin] + total * (costs.forward + recompute) + after
        return bounds[key]

    # best[k][begin]: the least bound of the stages from k on, which have the layers from `begin` on.
    best = [[float("inf")] * (num_layers + 1) for _ in range(num_stages + 1)]
    best[num_stages][num_layers] = 0.0
    for stage in reversed(range(num_stages)):
        for begin in range(stage, num_layers):
            best[stage][begin] = min(
                (
                    max(bound_of(stage, begin, end), best[stage + 1][end])
                    for end in range(begin + 1, num_layers - (num_stages - stage - 1) + 1)
                ),
                default=float("inf"),
            )
    queue: list[tuple[float, tuple[int, ...], float]] = [(best[0][0], (), 0.0)]
    while queue:
        bound, balance, so_far = heappop(queue)
        stage, begin = len(balance), sum(balance)
        if stage == num_stages:
            yield bound, balance
            continue
        for end in range(begin + 1, num_layers - (num_stages - stage - 1) + 1):
            own = max(so_far, bound_of(stage, begin, end))
            bound = max(own, best[stage + 1][end])
            if bound < float("inf"):
                heappush(queue, (bound, (*balance, end - begin), own))


def _least_recompute(rungs: Sequence[Rung], saved: float) -> float:
    """Returns a bound on the mean time of recomputation if micro-batches save so much in the mean."""
    if saved < 0:
        return float("inf")
    hull: list[Rung] = []  # between rungs, a mean is on a line; the least ones are on the lower hull
    for rung in rungs:
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], rung):
            hull.pop()
        hull.append(rung)
    for before, after in pairwise(hull):
        if saved < after.saved:
            share = (saved - before.saved) / (after.saved - before.saved)
            return before.recompute + share * (after.recompute - before.recompute)
    return rungs[-1].recompute


def _is_above(rung: Rung, before: Rung, after: Rung) -> bool:
    """Returns whether a rung is on or above the line between two others."""
    left = (rung.recompute - before.recompute) * (after.saved - before.saved)
    return left >= (after.recompute - before.recompute) * (rung.saved - before.saved)
