"""The least recomputation that fits into a number of bytes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from gpipe_fast.schedule import Schedule, schedule_for
from gpipe_fast.schedule.budget import Budget, BudgetError, Rung, StageCosts

MIB = 2**20


def schedules(
    name: str, num_stages: int, num_microbatches: int
) -> Callable[[frozenset[tuple[int, int]]], Schedule]:
    return lambda recomputed: schedule_for(name, num_stages, num_microbatches, recomputed=recomputed)


def random_stage(draw: random.Random, num_rungs: int, device: str) -> StageCosts:
    """Returns a stage whose first rungs save most time for their bytes, as those of minimum cuts do."""
    forward = draw.uniform(1, 3)
    steps = [(draw.uniform(0.1, 1), draw.randint(1, 20) * MIB) for _ in range(num_rungs - 1)]
    steps.sort(key=lambda step: step[0] / step[1], reverse=True)
    total = sum(time for time, _ in steps)
    saved = list(itertools.accumulate((size for _, size in steps), initial=0))
    times = [forward * (1 - t / total) for t in itertools.accumulate((t for t, _ in steps), initial=0.0)]
    share = draw.uniform(0.2, 1)  # what is recomputed is in the scratch memory
    scratch = [5 * MIB + share * (saved[-1] - size) for size in saved]
    times[-1] = 0.0
    rungs = tuple(map(Rung, saved, times, scratch))
    boundary = draw.randint(1, 5) * MIB
    return StageCosts(forward, 2 * forward, rungs, boundary, {"parameters": 7.0 * MIB}, device)


def budget_of(name: str, draw: random.Random, num_stages: int, number: int, rungs: int) -> Budget:
    costs = [random_stage(draw, rungs, f"gpu{stage}") for stage in range(num_stages)]
    sizes = [1.0] * (number - 1) + [draw.choice([1.0, 0.4])]
    return Budget(costs, sizes, schedules(name, num_stages, number))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_what_is_chosen_fits_and_more_bytes_are_never_slower(name: str) -> None:
    draw = random.Random(name)
    for _ in range(10):
        stages, number = draw.randint(1, 4), draw.randint(1, 10)
        budget = budget_of(name, draw, stages, number, draw.randint(2, 6))
        least = budget.least()
        before = float("inf")
        for share in (0.0, 0.1, 0.3, 0.6, 1.0, 2.0, 100.0):
            limits = {f"gpu{stage}": size * (1 + share) for stage, size in enumerate(least)}
            climb = budget.choose(limits)
            assert all(size <= limits[f"gpu{stage}"] for stage, size in enumerate(climb.bytes))
            assert climb.time <= before * (1 + 1e-12)
            before = climb.time
        nothing = [[len(own.rungs) - 1] * number for own in budget.costs]
        assert before == pytest.approx(budget.time_of(nothing))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_no_choice_of_an_exhaustive_search_is_faster_by_more_than_three_percent(name: str) -> None:
    draw = random.Random(name)
    worst = []
    for _ in range(10):
        stages, number, rungs = draw.choice([(2, 2, 6), (1, 3, 8), (3, 1, 9)])
        budget = budget_of(name, draw, stages, number, rungs)
        limits = {f"gpu{s}": size * draw.uniform(1, 2.5) for s, size in enumerate(budget.least())}
        found = budget.choose(limits)
        # A stage's own choices that fit; of these, only what no other one beats in every micro-batch.
        fitting = []
        for stage in range(stages):
            rows = [
                row
                for row in itertools.product(range(rungs), repeat=number)
                if budget._bytes(stage, row) <= limits[f"gpu{stage}"]
            ]
            fitting.append(
                [
                    row
                    for row in rows
                    if not any(o != row and all(a >= b for a, b in zip(o, row, strict=True)) for o in rows)
                ]
            )
        best = min(budget.time_of(rows) for rows in itertools.product(*fitting))
        worst.append(found.time / best)
    assert max(worst) <= 1.03


def test_stages_of_a_device_share_its_bytes() -> None:
    draw = random.Random(0)
    costs = [random_stage(draw, 4, device) for device in ("a", "b", "a")]
    budget = Budget(costs, [1.0] * 4, schedules("1f1b", 3, 4))
    least = budget.least()
    limits = {"a": 1.2 * (least[0] + least[2]), "b": 100 * least[1]}
    climb = budget.choose(limits)
    assert climb.bytes[0] + climb.bytes[2] <= limits["a"]
    assert sum(climb.rungs[0] + climb.rungs[2]) > 0
    assert set(climb.rungs[1]) == {3}


def test_what_cannot_be_met_says_what_it_consists_of() -> None:
    own = StageCosts(1, 2, (Rung(0, 1, 4 * MIB), Rung(9 * MIB, 0)), 2 * MIB, {"parameters": 5 * MIB}, "cpu")
    budget = Budget([own], [1.0] * 3, schedules("gpipe", 1, 3))
    assert budget.choose({"cpu": 15 * MIB}).rungs == ((0, 0, 0),)
    with pytest.raises(
        BudgetError, match=r"memory is 14\.9 MiB on cpu, but at least 15\.0 MiB is needed"
    ) as error:
        budget.choose({"cpu": 14.9 * MIB})
    with pytest.raises(BudgetError, match=r"memory is 14\.9 MiB on cpu, but at least 15\.1 MiB is needed"):
        Budget([replace(own, boundary=2.01 * MIB)], [1.0] * 3, schedules("gpipe", 1, 3)).choose(
            {"cpu": 14.96 * MIB}
        )
    assert "5.0 MiB of parameters, 6.0 MiB of boundary tensors, 4.0 MiB of intermediates" in str(error.value)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_scratch_memory_that_does_not_stay_is_counted_once(name: str) -> None:
    """A stage runs one program at a time, also between the two parts of a backward."""
    own = [StageCosts(1, 2, (Rung(0, 0, 4 * MIB),), 0, {}, f"gpu{i}", scratch_stays=False) for i in range(4)]
    assert [*Budget(own, [1.0] * 8, schedules(name, 4, 8)).least()] == [4 * MIB] * 4
