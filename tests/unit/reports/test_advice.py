"""Advice for steps whose durations are known, and `GPipe.report`."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from gpipe_fast.reports.advice import (
    Advice,
    Alternative,
    Costs,
    Found,
    LayerCosts,
    Measurements,
    best_balance,
    improvements,
)
from gpipe_fast.schedule import fill_drain, simulate

pytestmark = pytest.mark.filterwarnings("ignore:.*stages idle")


class Step:
    """A step whose action of a stage takes a constant and a part for each sample; a backward twice as long.

    Attributes:
        fixed: the constant of each stage.
        each: the part for each sample, of each stage.
    """

    def __init__(
        self, batch: int, fixed: list[float], each: list[float], schedule: str, checkpoint: str
    ) -> None:
        self.batch, self.fixed, self.each = batch, fixed, each
        self.schedule, self.checkpoint = schedule, checkpoint

    def options(self, chunks: int) -> dict[str, Any]:
        forward = [a + b * (self.batch / chunks) for a, b in zip(self.fixed, self.each, strict=True)]
        return {"forward": forward, "backward": [2 * x for x in forward], "checkpoint": self.checkpoint}

    def time(self, chunks: int, **changes: Any) -> float:
        options = self.options(chunks) | changes
        schedule = options.pop("schedule", self.schedule)
        return simulate(schedule, len(self.fixed), chunks, **options).time

    def costs(self, chunks: int) -> Costs:
        found = simulate(self.schedule, len(self.fixed), chunks, **self.options(chunks))
        seconds = {action: end - found.begins[action] for action, end in found.ends.items()}
        return Costs([found.schedule], seconds)

    def tried(self, number: int, other: int) -> Alternative | None:
        if not 1 <= other <= self.batch:
            return None
        return Alternative(other, self.costs(other), [self.time(other) / self.time(number)] * 2)

    def advice(self, number: int, **options: Any) -> list[Advice]:
        return self.found(number, self.costs(number), **options).advice

    def found(self, number: int, costs: Costs, *, shortest: float = 0.0, **options: Any) -> Found:
        names = [name for name in options if name in Measurements._fields]
        measured = {"chunks": lambda other: self.tried(number, other)} | {
            name: options.pop(name) for name in names
        }
        return improvements(
            self.time(number),
            shortest or self.time(number),
            costs,
            schedule=self.schedule,
            checkpoint=self.checkpoint,
            measured=Measurements(**measured),
            **options,
        )


def test_too_few_micro_batches() -> None:
    step = Step(32, [0.1] * 4, [0.1] * 4, "1f1b", "never")
    best = min((1, 2, 4, 8, 16, 32), key=step.time)
    assert best > 2
    first = step.advice(2)[0]
    assert (first.what, first.settings) == ("more micro-batches", {"chunks": best})
    assert first.code == f"model.chunks = {best}"
    (with_norm,) = [a for a in step.advice(2, batch_norm=True) if a.settings == first.settings]
    assert with_norm.what.startswith(
        "more micro-batches; batch norm normalises by the samples of a micro-batch"
    )
    assert first.predicted == pytest.approx(step.time(best))


def test_a_slow_stage() -> None:
    """Four of six equal layers are in the last of three stages."""
    step = Step(8, [0.0] * 3, [1.0, 1.0, 4.0], "gpipe", "never")
    layers = LayerCosts([3.0] * 6, [1] * 6)
    first = step.advice(8, layers=lambda: ([layers], [1, 1, 4]))[0]
    assert first.what == "another balance"
    assert first.settings == {"balance": [2, 2, 2]}
    (of_ranks,) = (
        advice
        for advice in step.advice(8, layers=lambda: ([layers], [1, 1, 4]), layers_stay=True)
        if advice.settings == first.settings
    )
    assert of_ranks.code == "GPipe(..., balance=[2, 2, 2])", "it cannot be set"
    even = Step(8, [0.0] * 3, [2.0] * 3, "gpipe", "never")
    assert first.predicted == pytest.approx(even.time(8))


def test_the_best_balance_of_random_layers() -> None:
    """No balance is faster than the one found by more than 3%, over all of them."""
    for seed, num_stages in itertools.product(range(4), (2, 3, 4)):
        rng = random.Random(seed)
        layers = LayerCosts([rng.uniform(1, 5) for _ in range(9)], [rng.choice([1, 3]) for _ in range(9)])
        present = [9 - num_stages + 1, *[1] * (num_stages - 1)]
        sizes = layers.times(present)
        found = simulate("1f1b", num_stages, 8, forward=sizes, checkpoint="never")
        costs = Costs([found.schedule], {a: end - found.begins[a] for a, end in found.ends.items()})
        cuts = itertools.combinations(range(1, 9), num_stages - 1)
        balances = [[b - a for a, b in itertools.pairwise((0, *cut, 9))] for cut in cuts]
        best = min(costs.with_balance(layers, present, balance) for balance in balances)
        found_one = best_balance(costs, layers, present)
        assert costs.with_balance(costs.as_recorded(layers, present), present, found_one) <= 1.03 * best


def test_the_recorded_time_of_a_layer_moves_with_it() -> None:
    """Alone, layer 1 takes as long as others; in the step ten times, so its stage gets no more layers."""
    step = Step(8, [0.0] * 2, [11.0, 2.0], "gpipe", "never")
    layers = LayerCosts([3.0] * 4, [1] * 4)
    costs = replace(step.costs(8), python_layers={1: "layer 1"})
    assert costs.as_recorded(layers, [2, 2]).seconds == pytest.approx([3, 30, 3, 3])
    moved = simulate("gpipe", 2, 8, forward=[1.0, 12.0], backward=[2.0, 24.0], checkpoint="never")
    assert costs.with_balance(costs.as_recorded(layers, [2, 2]), [2, 2], [1, 3]) == pytest.approx(moved.time)
    assert best_balance(costs, layers, [2, 2]) == [2, 2]


def test_no_number_of_micro_batches_without_a_clear_slope() -> None:
    """Smaller micro-batches took longer, which says nothing about larger ones."""
    step = Step(32, [1.0] * 2, [0.1] * 2, "gpipe", "never")
    slower = {action: 2 * seconds for action, seconds in step.costs(16).seconds.items()}
    tried = Alternative(16, Costs(step.costs(16).phases, slower), [0.5, 0.5])
    found = step.found(8, step.costs(8), chunks=lambda _: tried)
    assert [advice for advice in found.advice if "chunks" in advice.settings] == []


def test_no_prediction_is_below_the_work() -> None:
    """One processor runs all stages, so that nothing is gained by work at the same time."""
    step = Step(32, [0.0] * 4, [0.1] * 4, "gpipe", "never")
    costs = replace(step.costs(2), processors=1.0)
    work = sum(costs.seconds.values())
    assert costs.time() == pytest.approx(work)
    tried = Alternative(4, replace(step.costs(4), processors=1.0), [1.0, 1.0])
    assert step.found(2, costs, chunks=lambda _: tried, shortest=work).advice == []


def test_what_measurements_do_not_hold_is_withheld() -> None:
    """Steps that take longer than their actions, halves that differ, and threads that should gain."""
    step = Step(8, [0.0] * 3, [1.0] * 3, "gpipe", "always")
    found = step.found(8, step.costs(8), shortest=1.2 * step.time(8))
    assert not any("checkpoint" in advice.settings for advice in found.advice)
    assert "keep all activations, if memory suffices (model.checkpoint)" in found.withheld
    few = Step(32, [0.1] * 4, [0.1] * 4, "1f1b", "never")
    noisy = Alternative(4, few.costs(4), [0.6, 1.1])
    found = few.found(2, few.costs(2), chunks=lambda other: noisy if other == 4 else None)
    assert not any("chunks" in advice.settings for advice in found.advice)
    assert "more micro-batches (model.chunks)" in found.withheld
    threads = Alternative(1, few.costs(2), [1.0, 1.0], is_expected=True)
    assert (
        "fewer intra-op threads (model.threads_per_stage)"
        in few.found(2, few.costs(2), threads=lambda: threads).withheld
    )


def test_another_schedule() -> None:
    step = Step(8, [0.0] * 4, [1.0] * 4, "1f1b", "never")
    advice = next(advice for advice in step.advice(8) if "schedule" in advice.settings)
    assert advice.settings == {"schedule": "zb-h1"}
    assert advice.predicted == pytest.approx(step.time(8, schedule="zb-h1"))


def test_forward_and_backward_in_two_calls() -> None:
    """No schedule is advised, and the number of micro-batches is predicted from both runs."""
    step = Step(16, [0.1] * 2, [0.1] * 2, "gpipe", "never")

    def costs(chunks: int) -> Costs:
        seconds = step.costs(chunks).seconds
        whole = fill_drain(2, chunks, recomputed=())
        return Costs([whole.forward_part(), whole.backward_part()], seconds)

    def tried(chunks: int) -> Alternative | None:
        return (
            None
            if chunks not in range(1, 17)
            else Alternative(chunks, costs(chunks), [costs(chunks).time() / costs(1).time()] * 2)
        )

    found = improvements(
        costs(1).time(),
        costs(1).time(),
        costs(1),
        schedule=None,
        checkpoint="never",
        measured=Measurements(chunks=tried),
    ).advice
    best = min((1, 2, 4, 8, 16), key=lambda chunks: costs(chunks).time())
    assert [advice.settings for advice in found] == [{"chunks": best}]
    assert found[0].predicted == pytest.approx(costs(best).time())
