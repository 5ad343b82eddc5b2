"""Advice for steps whose durations are known, and `GPipe.report`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.recording import Event
from gpipe_fast.recording.advice import (
    Advice,
    Costs,
    LayerCosts,
    Measurements,
    best_balance,
    improvements,
)
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

    def advice(self, chunks: int, **measured: Any) -> list[Advice]:
        other = 2 * chunks if 2 * chunks <= self.batch else chunks // 2
        measured["chunks"] = lambda: self.costs(other)
        return improvements(
            self.time(chunks),
            self.costs(chunks),
            batch_size=self.batch,
            schedule=self.schedule,
            checkpoint=self.checkpoint,
            measured=Measurements(**measured),
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
    layers = LayerCosts([3.0] * 6, [1] * 6)
    first = step.advice(8, layers=lambda: (layers, [1, 1, 4]))[0]
    assert first.what == "another balance"
    assert first.settings == {"balance": [2, 2, 2]}
    even = Step(8, [0.0] * 3, [2.0] * 3, "gpipe", "never")
    assert first.predicted == pytest.approx(even.time(8))


def test_a_slow_link() -> None:
    """Twelve equal layers; behind the third, four times as much crosses as behind the others."""
    layers = LayerCosts([1.0] * 12, [100, 100, 400, *[100] * 9])

    def costs(balance: list[int]) -> Costs:
        sizes = layers.crossing(balance)
        found = simulate(
            "gpipe",
            2,
            8,
            forward=[n / 3 for n in balance],
            backward=[2 * n / 3 for n in balance],
            checkpoint="never",
        )
        seconds = {a: end - found.begins[a] for a, end in found.ends.items()}
        seconds |= {a: sizes[0] / 50 for a in seconds if a.kind in (Kind.SEND_F, Kind.SEND_B)}
        return Costs([found.schedule], seconds)

    present = costs([3, 9])
    advice = improvements(
        present.time(),
        present,
        batch_size=8,
        schedule="gpipe",
        checkpoint="never",
        measured=Measurements(layers=lambda: (layers, [3, 9])),
    )[0]
    assert advice.what == "another balance, where less crosses between stages"
    assert advice.settings["balance"][0] > 3
    assert advice.predicted == pytest.approx(costs(advice.settings["balance"]).time(), rel=0.01)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_the_best_balance_of_random_layers(num_stages: int) -> None:
    """No balance is faster than the one found by more than 3%, over all of them."""
    for seed in range(10):
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


def test_too_many_threads() -> None:
    step, other = (Step(8, [0.0] * 2, [each] * 2, "zb-h1", "never") for each in (2.0, 1.0))
    first = step.advice(8, threads=lambda: (1, other.costs(8)))[0]
    assert (first.what, first.code) == ("another number of intra-op threads", "model.threads_per_stage = 1")
    assert first.predicted == pytest.approx(other.time(8))


def test_a_layer_in_python() -> None:
    """Half of the second stage's forward is spent in the interpreter, and of its recompute."""
    step = Step(8, [0.0] * 2, [1.0, 2.0], "1f1b", "always")
    without = simulate("1f1b", 2, 8, forward=1.0, backward=[2.0, 4.0], checkpoint="always").time
    advice = step.advice(8, python=lambda: ({1: 1.0}, "layer 3 (Norm)"))
    (found,) = (each for each in advice if not each.settings)
    assert (found.what, found.code) == ("layer 3 (Norm): let C++ run what runs in Python", "")
    assert found.predicted == pytest.approx(without)


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
        measured=Measurements(chunks=lambda: costs(2)),
    )
    best = min((1, 2, 4, 8, 16), key=lambda chunks: costs(chunks).time())
    assert [advice.settings for advice in found] == [{"chunks": best}]
    assert found[0].predicted == pytest.approx(costs(best).time())


def test_medians_of_steps() -> None:
    action = Action(0, Kind.F, 0)
    costs = Costs.of(
        [fill_drain(1, 1, backward=False)],
        [{action: Event(action, False, 0.0, s, transit=s)} for s in (5.0, 1.0, 2.0)],
    )
    assert costs.time() == 2
    assert costs.transit == {action: 2}
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


class Busy(nn.Module):
    """A layer that runs in Python, and computes there for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e30:
            return x
        sum(range(100_000))
        return self.linear(x)


@pytest.mark.filterwarnings("ignore:.*runs in Python")
@pytest.mark.parametrize("loss", [True, False])
def test_python_layers_are_found_in_steps_and_in_calls(loss: bool) -> None:
    """They recompute in their backwards, which advice knows, too."""
    pipe = GPipe(nn.Sequential(Busy(), Busy()), [1, 1], chunks=4, checkpoint="always")
    options: dict[str, Any] = {"target": torch.zeros(8, 6), "loss_fn": F.mse_loss} if loss else {}
    advice = pipe.report(features(), **options).advice
    assert any("layer 0 (Busy), layer 1 (Busy)" in each.what for each in advice)
    assert any(each.settings == {"checkpoint": "never"} for each in advice)


def test_recomputes_within_backwards() -> None:
    """Without recompute, a backward takes 2 instead of 3; the R is there, but takes no time."""
    found = simulate("1f1b", 2, 4, forward=1.0, backward=3.0, weights=0.0, recompute=0.0, checkpoint="always")
    seconds = {a: end - found.begins[a] for a, end in found.ends.items()}
    costs = Costs([found.schedule], seconds, python_stages={0, 1})
    assert Costs([found.schedule], seconds).without_recompute() == pytest.approx(found.time)
    without = simulate("1f1b", 2, 4, forward=1.0, backward=2.0, weights=0.0, checkpoint="never")
    assert costs.without_recompute() == pytest.approx(without.time)


def test_a_report_changes_no_loss_no_numbers_of_numpy_and_no_later_warning() -> None:
    numpy = pytest.importorskip("numpy")
    loss = nn.Linear(4, 1)
    pipe = model()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = loss

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            numpy.random.rand()
            return self.layer(output).square().sum()

    state = numpy.random.get_state()[1].copy()
    pipe.report(features(), target=features(), loss_fn=Loss(), normalizer=1)
    assert all(p.grad is None for p in loss.parameters())
    assert (numpy.random.get_state()[1] == state).all()
    assert not pipe._warned_of_idle_stages


def test_a_recording_after_a_change_of_the_number_of_stages() -> None:
    pipe, x = model(), features()
    pipe.step(x, loss_fn=torch.sum, normalizer=1)
    pipe.balance = [6]
    with pipe.recording() as recording:
        pipe(x)
    assert len(recording.report().memory) == 1
