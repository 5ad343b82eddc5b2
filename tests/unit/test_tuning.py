"""`tune`: which settings it tries, in which order, and what it returns."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_fast
from gpipe_fast import GPipe
from gpipe_fast.recording import Advice, Trial, Tuning
from gpipe_fast.reports.steps import Steps
from tests.models import features, mlp

pytestmark = pytest.mark.filterwarnings("ignore:.*stages idle")


class Fake:
    """Steps whose times and advice are given by their settings, in place of steps that are recorded."""

    def __init__(self, times: dict[str, float], advice: dict[str, list[Advice]]) -> None:
        self.times, self.advice = times, advice
        self.tried: list[str] = []
        self.pipe = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], chunks=1)

    def code(self) -> str:
        before = {"chunks": 1, "checkpoint": "except_last"}
        settings = {name: getattr(self.pipe, name) for name in before}
        return "; ".join(f"{name}={value}" for name, value in settings.items() if value != before[name])

    def report(self, check: bool = False) -> mock.Mock:
        self.tried.append(self.code())
        if self.times[self.code()] < 0:
            raise RuntimeError("refused\nmore")
        return mock.Mock(step=self.times[self.code()], advice=self.advice.get(self.code(), []))

    def tune(self, seconds: float = 60.0) -> Tuning:
        steps = Steps(self.pipe, lambda: None, self.pipe.recording, 64, True)
        with mock.patch.multiple(steps, _report=self.report, _beside=self.beside):
            return steps.tune(seconds, None)

    def beside(self, settings: dict[str, Any]) -> tuple[None, list[float]]:
        code = "; ".join(f"{name}={value}" for name, value in settings.items())
        return None, [self.times[code] / self.times[""]]


def advice(predicted: float, **settings: Any) -> Advice:
    return Advice("a change", settings, predicted)


def test_advice_is_tried_in_the_order_of_its_prediction() -> None:
    fake = Fake(
        {"": 10, "chunks=4": 6, "checkpoint=never": 9, "chunks=4; checkpoint=never": 5},
        {
            "": [advice(8, checkpoint="never"), advice(7, chunks=4)],
            "chunks=4": [advice(5.5, checkpoint="never")],
        },
    )
    found = fake.tune()
    assert fake.tried == ["", "chunks=4", "chunks=4; checkpoint=never"]
    assert found.settings == {"chunks": 4, "checkpoint": "never"}
    assert found.code == "model.checkpoint = 'never'; model.chunks = 4"
    assert (found.before, found.after, found.is_complete) == (10, 5, True)
    assert [trial.measured for trial in found.trials] == [10, 6, 5]
    assert [trial.predicted for trial in found.trials] == [None, 7, 5.5]
    assert "50.0% less" in str(found)
    assert found.code in str(found)
    assert found.code in found._repr_html_()
    assert json.loads(json.dumps(found.to_dict()))["after"] == 5


def test_settings_with_which_a_step_fails_are_left_out() -> None:
    fake = Fake({"": 10, "chunks=4": -1}, {"": [advice(7, chunks=4)]})
    found = fake.tune()
    assert found.trials[1] == Trial({"chunks": 4}, 7, None, "RuntimeError: refused")
    assert (found.settings, found.code) == ({}, "")
    assert "RuntimeError: refused" in str(found)
    assert "Nothing that was tried is faster" in str(found)


def test_no_trial_begins_when_the_time_is_over() -> None:
    fake = Fake({"": 10}, {"": [advice(7, chunks=4)]})
    found = fake.tune(1e-9)
    assert fake.tried == [""]
    assert not found.is_complete
    assert "no time to try all advice" in str(found)


def test_a_real_pipeline_keeps_its_settings_and_state() -> None:
    pipe = GPipe(mlp(), [2, 3], chunks=8)
    settings = pipe.balance, pipe.chunks, pipe.checkpoint, pipe.schedule, pipe.threads_per_stage
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    found = gpipe_fast.tune(pipe, features(), target=torch.zeros(8, 4), loss_fn=F.mse_loss, seconds=2)
    assert isinstance(found, Tuning)
    assert found.after <= found.before
    assert settings == (pipe.balance, pipe.chunks, pipe.checkpoint, pipe.schedule, pipe.threads_per_stage)
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
    assert all(p.grad is None for p in pipe.parameters())
