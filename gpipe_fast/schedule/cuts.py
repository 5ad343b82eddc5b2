"""Where to cut a sequence of layers, if each stage recomputes as little as its bytes allow.

Cuts and recomputation depend on each other: a stage with fewer layers has more room, and recomputes less. The
time of a partition is estimated from its slowest stage: what it works, with the least recomputation that its
room allows, while the first stages fill and drain.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import nsmallest
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from gpipe_fast.schedule.actions import Kind
from gpipe_fast.schedule.schedule import Schedule
from gpipe_fast.schedule.simulation import Simulation

# The time of a stage that does not fit, to which the bytes that it lacks are added: any that fits is better.
TOO_LARGE = 1e18


class Rung(NamedTuple):
    """One choice of what a stage saves of a micro-batch.

    Attributes:
        saved: the bytes that are saved besides the boundary inputs.
        recompute: the time of the recomputation.
    """

    saved: float
    recompute: float


@dataclass(frozen=True)
class LayerNeeds:
    """What a layer takes as a stage of its own.

    Attributes:
        forward: the time of the forward of a whole micro-batch.
        backward: the time of its backward without recomputation.
        rungs: its ladder: ``saved`` never falls, ``recompute`` never rises.
        boundary: the bytes of the boundary inputs of a micro-batch, which are kept on each rung.
        outputs: the bytes of its boundary outputs.
        fixed: the bytes of parameters, buffers and gradients.
        scratch: the bytes that its programs need in addition while they run.
    """

    forward: float
    backward: float
    rungs: Sequence[Rung]
    boundary: float
    outputs: float
    fixed: float
    scratch: float


# The cost of a stage, given its index, and the first of its layers and of those behind it.
Cost = Callable[[int, int, int], float]


def best_partitions(
    cost: Cost,
    num_layers: int,
    num_stages: int,
    join: Callable[[float, float], float] = max,
    count: int = 1,
) -> list[tuple[float, tuple[int, ...]]]:
    """Returns the costs of partitions, and their numbers of layers, the least cost first.

    Args:
        cost: the cost of a stage.
        num_layers: the number of layers.
        num_stages: the number of stages, each of which has a layer at least.
        join: the cost of two stages together, which never falls if one of theirs rises.
        count: how many partitions, at most.
    """
    cost = cache(cost)
    # By the number of layers so far: the best partitions of these.
    best: dict[int, list[tuple[float, tuple[int, ...]]]] = {0: [(0.0, ())]}
    for stage in range(num_stages):
        best = {
            end: nsmallest(
                count,
                (
                    (join(so_far, cost(stage, begin, end)), (*balance, end - begin))
                    for begin, found in best.items()
                    if begin < end
                    for so_far, balance in found
                ),
            )
            for end in range(stage + 1, num_layers - (num_stages - stage - 1) + 1)
        }
    return best[num_layers]


def time_of_stages(
    layers: Sequence[LayerNeeds],
    devices: Sequence[Hashable],
    limits: Mapping[Any, float],
    sizes: Sequence[float],
    schedule: Schedule,
) -> Cost:
    """Returns a function that estimates the least time of a step with such a stage.

    The time of a stage that does not fit is `TOO_LARGE` and the bytes that it lacks.

    Args:
        layers: the layers.
        devices: the device of each stage.
        limits: the bytes of each device.
        sizes: the size of each micro-batch, relative to a whole one.
        schedule: the schedule if everything is recomputed.
    """
    total, every = sum(sizes), sum(x.fixed for x in layers)
    kept = Simulation.of(schedule).kept
    splits = any(action.kind is Kind.I for row in schedule.stages for action in row)
    fill, drain = (
        [min(sizes) * time for time in accumulate(times, initial=0.0)]
        for times in ((x.forward for x in layers), (x.backward for x in layers))
    )

    def time_of(stage: int, begin: int, end: int) -> float:
        own = layers[begin:end]
        needed = _needed(own, kept[stage])
        if len({*devices}) == 1:
            needed += every / len(devices) - sum(x.fixed for x in own)
        room = limits[devices[stage]] / devices.count(devices[stage]) - needed
        if room < 0:
            return TOO_LARGE - room
        forward, backward = sum(x.forward for x in own), total * sum(x.backward for x in own)
        # Weight gradients may be computed while earlier stages drain.
        after = max(backward, (backward + drain[begin]) / 2) if splits else backward + drain[begin]
        return fill[begin] + total * (forward + _recompute(_joined(own), room / kept[stage])) + after

    return time_of


def needs_of_stages(layers: Sequence[LayerNeeds], schedule: Schedule) -> Cost:
    """Returns a function that estimates the bytes of a stage if everything is recomputed."""
    kept = Simulation.of(schedule).kept
    return lambda stage, begin, end: _needed(layers[begin:end], kept[stage])


def _needed(layers: Sequence[LayerNeeds], kept: int) -> float:
    """Returns what a stage of these layers needs if everything is recomputed, and it keeps so many at a time.

    All that is recomputed is in the scratch memory, beside what the largest layer needs.
    """
    needed = max(x.scratch for x in layers) + _joined(layers)[-1].saved + sum(x.fixed for x in layers)
    return needed + kept * layers[0].boundary + 2 * (layers[0].boundary + layers[-1].outputs)


def _joined(layers: Sequence[LayerNeeds]) -> list[Rung]:
    """Returns the ladder of a stage of these layers: first the steps that save most time for their bytes.

    On the lowest rung, all is recomputed from the inputs of the stage; a layer that saves something keeps its
    inputs, too.
    """
    steps = []
    for number, layer in enumerate(layers):
        gain = float("inf")
        for rung, (before, after) in enumerate(pairwise(layer.rungs), 1):
            saved = after.saved - before.saved + (layer.boundary if number and rung == 1 else 0.0)
            time = before.recompute - after.recompute
            gain = min(gain, time / saved if saved else gain)
            steps.append((-gain, number, rung, saved, time))
    found = [Rung(0.0, sum(layer.rungs[0].recompute for layer in layers))]
    for *_, saved, time in sorted(steps):
        found.append(Rung(found[-1].saved + saved, found[-1].recompute - time))
    return found


def _recompute(rungs: Sequence[Rung], saved: float) -> float:
    """Returns the time of recomputation if micro-batches save so much in the mean, between two rungs."""
    for before, after in pairwise(rungs):
        if saved < after.saved:
            share = (saved - before.saved) / (after.saved - before.saved)
            return before.recompute + share * (after.recompute - before.recompute)
    return rungs[-1].recompute
