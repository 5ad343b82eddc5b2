"""Cuts and recomputation chosen together."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest

from gpipe_fast.schedule.budget import Budget, BudgetError, Rung, StageCosts
from gpipe_fast.schedule.cuts import best_partitions, stage_costs
from gpipe_fast.schedule.simulation import Simulation
from tests.unit.schedule.test_budget import MIB, random_stage, schedules


def random_layer(draw: random.Random) -> StageCosts:
    own = random_stage(draw, draw.randint(2, 5), "")
    scratch = draw.randint(1, 20) * MIB
    rungs = tuple(Rung(rung.saved, rung.recompute, scratch) for rung in own.rungs)
    return StageCosts(
        own.forward,
        own.backward,
        rungs,
        own.boundary,
        {"parameters": draw.randint(1, 9) * MIB},
        "",
        draw.randint(1, 4) * MIB,
    )


def balances(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, num_layers), num_stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *own, num_layers))) for own in cuts]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_no_partition_of_all_is_faster(name: str) -> None:
    draw = random.Random(name)
    for _ in range(6):
        num_layers, num_stages, number = draw.choice([(6, 3, 4), (7, 2, 6), (5, 4, 3)])
        layers = [random_layer(draw) for _ in range(num_layers)]
        devices = [f"gpu{stage}" for stage in range(num_stages)]
        sizes = [1.0] * (number - 1) + [draw.choice([0.5, 1.0])]
        schedule_of = schedules(name, num_stages, number)

        everything = schedule_of(frozenset(itertools.product(range(num_stages), range(number))))
        costs_of = partial(
            stage_costs, devices=devices, kept=Simulation.of(everything).kept, slots=everything.slots
        )

        def budget_of(
            balance: tuple[int, ...], layers=layers, sizes=sizes, of=schedule_of, costs_of=costs_of
        ):
            ends = itertools.accumulate(balance)
            parts = [layers[end - size : end] for end, size in zip(ends, balance, strict=True)]
            return Budget([costs_of(p, s) for s, p in enumerate(parts)], sizes, of)

        everywhere = {balance: budget_of(balance) for balance in balances(num_layers, num_stages)}
        least = min(max(budget.least()) for budget in everywhere.values())
        limits = dict.fromkeys(devices, least * draw.uniform(1.05, 2))
        times = {}
        for balance, budget in everywhere.items():
            try:
                times[balance] = budget.choose(limits).time
            except BudgetError:
                continue
        found = best_partitions(layers, devices, limits, sizes, schedule_of)
        assert [p.climb.time for p in found] == pytest.approx(sorted(times.values())[: len(found)])
        assert len(found) == min(3, len(times))
        for partition in found:
            assert partition.climb.time == times[partition.balance]
