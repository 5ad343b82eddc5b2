"""Advice for steps whose durations are known, and `GPipe.report`."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from gpipe_fast.reports.advice import (
    Advice,
    Costs,
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

    def advice(self, chunks: int, batch_norm: bool = False, **measured: Any) -> list[Advice]:
        other = 2 * chunks if 2 * chunks <= self.batch else chunks // 2
        measured["chunks"] = lambda: self.costs(other)
        return improvements(
            [self.time(chunks)],
            self.costs(chunks),
            batch_size=self.batch,
            schedule=self.schedule,
            checkpoint=self.checkpoint,
            measured=Measurements(**measured),
            batch_norm=batch_norm,
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


def test_needless_recompute() -> None:
    step = Step(8, [0.0] * 3, [1.0] * 3, "gpipe", "always")
    found = {advice.code: advice for advice in step.advice(8)}
    advice = found['model.checkpoint = "never"'.replace('"', "'")]
    assert advice.predicted == pytest.approx(step.time(8, checkpoint="never"))


def test_a_slow_stage() -> None:
    """Four of six equal layers are in the last of three stages."""
    step = Step(8, [0.0] * 3, [1.0, 1.0, 4.0], "gpipe", "never")
    layers = LayerCosts([3.0] * 6, [1] * 6)
    first = step.advice(8, layers=lambda: (layers, [1, 1, 4]))[0]
    assert first.what == "another balance"
    assert first.settings == {"balance": [2, 2, 2]}
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
        assert best_balance(costs, layers, present)[1] <= 1.03 * best


def test_a_layer_in_python() -> None:
    """Half of the second stage's forward is spent in the interpreter, and of its recompute."""
    step = Step(8, [0.0] * 2, [1.0, 2.0], "1f1b", "always")
    without = simulate("1f1b", 2, 8, forward=1.0, backward=[2.0, 4.0], checkpoint="always").time
    layers = LayerCosts([3.0, 6.0], [1, 1], [1.0, 2.0], {1: 1.0}, {1: "layer 3 (Norm)"})
    advice = step.advice(8, layers=lambda: (layers, [1, 1]))
    (found,) = (each for each in advice if not each.settings)
    assert (found.what, found.code) == ("layer 3 (Norm): let C++ run what runs in Python", "")
    assert found.predicted == pytest.approx(without)


def test_the_recorded_time_of_a_layer_moves_with_it() -> None:
    """Alone, layer 1 takes as long as others; in the step ten times, so its stage gets no more layers."""
    step = Step(8, [0.0] * 2, [11.0, 2.0], "gpipe", "never")
    layers = LayerCosts([3.0] * 4, [1] * 4, [1.0] * 4, {1: 1.0}, {1: "layer 1"})
    costs = step.costs(8)
    assert costs.as_recorded(layers, [2, 2]).seconds == pytest.approx([3, 30, 3, 3])
    moved = simulate("gpipe", 2, 8, forward=[1.0, 12.0], backward=[2.0, 24.0], checkpoint="never")
    assert costs.with_balance(costs.as_recorded(layers, [2, 2]), [2, 2], [1, 3]) == pytest.approx(moved.time)
    assert best_balance(costs, layers, [2, 2])[0] == [2, 2]


def test_no_number_of_micro_batches_without_a_clear_slope() -> None:
    """Smaller micro-batches took longer, which says nothing about larger ones."""
    step = Step(32, [1.0] * 2, [0.1] * 2, "gpipe", "never")
    slower = {action: 2 * seconds for action, seconds in step.costs(16).seconds.items()}
    found = improvements(
        [step.time(8)],
        step.costs(8),
        batch_size=32,
        schedule=None,
        checkpoint="never",
        measured=Measurements(chunks=lambda: Costs(step.costs(16).phases, slower)),
    )
    assert [advice for advice in found if "chunks" in advice.settings] == []


def test_another_schedule() -> None:
    step = Step(8, [0.0] * 4, [1.0] * 4, "1f1b", "never")
    advice = next(advice for advice in step.advice(8) if "schedule" in advice.settings)
    assert advice.settings == {"schedule": "zb-h1"}
    assert advice.predicted == pytest.approx(step.time(8, schedule="zb-h1"))


def test_a_good_step_gets_no_advice() -> None:
    step = Step(64, [0.002] * 2, [1.0] * 2, "zb-h1", "never")
    assert step.advice(64) == []


def test_forward_and_backward_in_two_calls() -> None:
    """No schedule is advised, and the number of micro-batches is predicted from both runs."""
    step = Step(16, [0.1] * 2, [0.1] * 2, "gpipe", "never")

    def costs(chunks: int) -> Costs:
        seconds = step.costs(chunks).seconds
        whole = fill_drain(2, chunks, recomputed=())
        return Costs([whole.forward_part(), whole.backward_part()], seconds)

    found = improvements(
        [costs(1).time()],
        costs(1),
        batch_size=16,
        schedule=None,
        checkpoint="never",
        measured=Measurements(chunks=lambda: costs(2)),
    )
    best = min((1, 2, 4, 8, 16), key=lambda chunks: costs(chunks).time())
    assert [advice.settings for advice in found] == [{"chunks": best}]
    assert found[0].predicted == pytest.approx(costs(best).time())
