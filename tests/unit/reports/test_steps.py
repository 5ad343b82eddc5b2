"""Recorded steps for a report: they change neither the model, nor numbers, nor settings."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.container import runner_of
from gpipe_fast.schedule import Kind
from tests.internals import pipeline_of
from tests.models import features

pytestmark = pytest.mark.filterwarnings("ignore:.*stages idle")


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


@pytest.mark.parametrize(("loss", "backend"), [(True, "aten"), (False, "eager")])
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
    assert not pipeline_of(pipe).recorded()


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
    assert runner_of(pipe).warns_of_idle_stages
