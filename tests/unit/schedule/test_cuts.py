"""Cuts and recomputation chosen together."""

from __future__ import annotations

import itertools
import random

import pytest

from gpipe_fast.schedule.budget import UNDER_WAY, Budget, BudgetError, Rung, StageCosts
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
        kept = Simulation.of(everything).kept

        def budget_of(
            balance: tuple[int, ...], layers=layers, devices=devices, sizes=sizes, of=schedule_of, kept=kept
        ):
            ends = itertools.accumulate(balance)
            parts = [layers[end - size : end] for end, size in zip(ends, balance, strict=True)]
            return Budget([stage_costs(p, s, devices, kept) for s, p in enumerate(parts)], sizes, of)

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


def test_a_stage_of_layers_recomputes_everything_or_nothing_at_the_ends() -> None:
    draw = random.Random(0)
    layers = [random_layer(draw) for _ in range(4)]
    own = stage_costs(layers, 1, ["cpu"] * 3, [4, 3, 1])
    assert own.rungs[0].saved == 0
    assert own.rungs[0].recompute == pytest.approx(sum(layer.forward for layer in layers))
    assert own.rungs[-1].recompute == 0
    assert own.rungs[-1].saved == sum(x.rungs[-1].saved for x in layers) + sum(x.boundary for x in layers[1:])
    assert own.boundary == layers[0].boundary
    waiting = 3 * layers[0].boundary + 3 * layers[-1].outputs
    assert own.fixed == {"parameters": sum(x.fixed["parameters"] for x in layers), UNDER_WAY: waiting}


def test_an_error_if_nothing_fits() -> None:
    layers = [random_layer(random.Random(0)) for _ in range(4)]
    for devices in (["a", "b"], ["a", "a"]):
        limits = dict.fromkeys(devices, 1.0 * MIB)
        with pytest.raises(BudgetError, match=r"at least .* is needed if everything is recomputed"):
            best_partitions(layers, devices, limits, [1.0] * 2, schedules("gpipe", 2, 2))
