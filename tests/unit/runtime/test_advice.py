"""Advice for steps whose durations are known, and `GPipe.report`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.runtime.advice import Advice, Costs, improvements
from gpipe_fast.schedule import Action, Kind, fill_drain, simulate
from tests.models import features

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

    def advice(self, chunks: int, balance: tuple[list[int], list[float]] | None = None) -> list[Advice]:
        other = 2 * chunks if 2 * chunks <= self.batch else chunks // 2
        return improvements(
            self.time(chunks),
            self.costs(chunks),
            batch_size=self.batch,
            schedule=self.schedule,
            checkpoint=self.checkpoint,
            other=lambda: self.costs(other),
            new_balance=lambda: balance,
        )


def test_too_few_micro_batches() -> None:
    step = Step(32, [0.1] * 4, [0.1] * 4, "1f1b", "never")
    best = min((1, 2, 4, 8, 16, 32), key=step.time)
    assert best > 2
    first = step.advice(2)[0]
    assert (first.what, first.settings) == ("more micro-batches", {"chunks": best})
    assert first.code == f"model.chunks = {best}"
    assert first.predicted == pytest.approx(step.time(best))


def test_too_many_micro_batches() -> None:
    step = Step(32, [1.0] * 2, [0.01] * 2, "gpipe", "never")
    first = step.advice(32)[0]
    assert first.settings == {"chunks": 1}
    assert "more memory" in first.what
    assert first.predicted == pytest.approx(step.time(1))


def test_needless_recompute() -> None:
    step = Step(8, [0.0] * 3, [1.0] * 3, "gpipe", "always")
    found = {advice.code: advice for advice in step.advice(8)}
    advice = found['model.checkpoint = "never"'.replace('"', "'")]
    assert advice.predicted == pytest.approx(step.time(8, checkpoint="never"))


def test_a_slow_stage() -> None:
    """Four of six equal layers are in the last of three stages."""
    step = Step(8, [0.0] * 3, [1.0, 1.0, 4.0], "gpipe", "never")
    first = step.advice(8, ([2, 2, 2], [2.0, 2.0, 0.5]))[0]
    assert first.settings == {"balance": [2, 2, 2]}
    even = Step(8, [0.0] * 3, [2.0] * 3, "gpipe", "never")
    assert first.predicted == pytest.approx(even.time(8))


@pytest.mark.parametrize("present", ["gpipe", "1f1b"])
def test_another_schedule(present: str) -> None:
    step = Step(8, [0.0] * 4, [1.0] * 4, present, "never")
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
        costs(1).time(),
        costs(1),
        batch_size=16,
        schedule=None,
        checkpoint="never",
        other=lambda: costs(2),
        new_balance=lambda: None,
    )
    best = min((1, 2, 4, 8, 16), key=lambda chunks: costs(chunks).time())
    assert [advice.settings for advice in found] == [{"chunks": best}]
    assert found[0].predicted == pytest.approx(costs(best).time())


def test_medians_of_steps() -> None:
    action = Action(0, Kind.F, 0)
    costs = Costs.of([fill_drain(1, 1, backward=False)], [{action: s} for s in (5.0, 1.0, 2.0)])
    assert costs.time() == 2
    assert not costs.has_backward


def model(**options: Any) -> GPipe:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)
    )
    return GPipe(layers, [4, 2], devices=["cpu"] * 2, chunks=4, **options)


def state(pipe: GPipe) -> Iterator[Any]:
    yield from (value.clone() for value in pipe.state_dict().values())
    yield torch.get_rng_state()
    yield torch.tensor(random.getstate()[1])


@pytest.mark.parametrize("backend", ["aten", "eager"])
@pytest.mark.parametrize("loss", [True, False])
def test_a_report_leaves_everything_as_it_was(loss: bool, backend: str) -> None:
    pipe, x = model(backend=backend, schedule="1f1b"), features().requires_grad_()
    target = torch.zeros(len(x), dtype=torch.int64)
    gradients = [torch.full_like(p, 3.0) for p in pipe.parameters()]
    for parameter, gradient in zip(pipe.parameters(), gradients, strict=True):
        parameter.grad = gradient
    before = list(state(pipe))
    options: dict[str, Any] = {"target": target, "loss_fn": F.cross_entropy} if loss else {}
    report = pipe.report(x, check=True, **options)
    assert all(torch.equal(a, b) for a, b in zip(state(pipe), before, strict=True))
    assert all(p.grad is g for p, g in zip(pipe.parameters(), gradients, strict=True))
    assert all(bool((g == 3).all()) for g in gradients)
    assert x.grad is None
    settings = pipe.balance, pipe.chunks, pipe.checkpoint, pipe.schedule
    assert settings == ([4, 2], 4, "except_last", "1f1b")
    assert report.num_microbatches == 4
    assert (report.between > 0) == (not loss)
    assert len(report.advice) <= 3
    assert all(advice.predicted < report.step for advice in report.advice)
    assert [advice.measured is not None for advice in report.advice] == [True, False, False][
        : len(report.advice)
    ]
    assert ("measured ms" in str(report)) == bool(report.advice)
    assert len(report.to_dict()["advice"]) == len(report.advice)


def test_a_report_without_gradients_is_of_forwards() -> None:
    pipe = model().eval()
    with torch.no_grad():
        report = pipe.report(features())
    assert {action.kind for action in report.critical_path} <= {Kind.F, Kind.SEND_F, Kind.RECV_F}
    assert not {"schedule", "checkpoint"} & {name for advice in report.advice for name in advice.settings}


def test_settings_are_restored_if_a_step_fails() -> None:
    pipe = model()
    before = list(state(pipe))

    def fail_with_other_chunks(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        pipe.report(features(), target=features(), loss_fn=fail_with_other_chunks, normalizer=1)
    assert pipe.chunks == 4
    assert all(torch.equal(a, b) for a, b in zip(state(pipe), before, strict=True))
    assert not pipe._pipeline.recorded()
