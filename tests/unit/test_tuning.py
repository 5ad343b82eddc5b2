"""`tune`: which settings it tries, in which order, and what it returns."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe_fast
from gpipe_fast import GPipe
from gpipe_fast.recording import Advice, Trial, Tuning
from gpipe_fast.reports.steps import Steps
from tests.models import features

pytestmark = pytest.mark.filterwarnings("ignore:.*stages idle")


class Sleep(nn.Module):
    """A layer in Python that takes a constant, and a part for each sample."""

    def __init__(self, constant: float, each: float) -> None:
        super().__init__()
        self.constant, self.each = constant, each

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.constant + self.each * len(x))
        return x


class Fake:
    """The times of settings, in place of steps that are recorded."""

    def __init__(self, times: dict[str, float], advice: dict[str, list[Advice]]) -> None:
        self.times, self.advice = times, advice
        self.tried: list[str] = []


def steps_of(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Returns steps whose reports are those of a fake model."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], chunks=1)
    steps = Steps(pipe, lambda: None, pipe.recording, 64, True)

    class Report:
        def __init__(self, code: str) -> None:
            self.step, self.advice = fake.times[code], fake.advice.get(code, [])

    def code() -> str:
        changed = [("chunks", 1), ("checkpoint", "except_last")]
        return "; ".join(f"{n}={getattr(pipe, n)}" for n, was in changed if getattr(pipe, n) != was)

    def report(check: bool = False) -> Report:
        fake.tried.append(code())
        if fake.times[code()] < 0:
            raise RuntimeError("refused\nmore")
        return Report(code())

    monkeypatch.setattr(steps, "_report", report)
    monkeypatch.setattr(steps, "_measure", lambda: (Report(code()), None))
    return steps


def advice(predicted: float, **settings: Any) -> Advice:
    return Advice("a change", settings, predicted)


def test_advice_is_tried_in_the_order_of_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(
        {"": 10, "chunks=4": 6, "checkpoint=never": 9, "chunks=4; checkpoint=never": 5},
        {
            "": [advice(8, checkpoint="never"), advice(7, chunks=4)],
            "chunks=4": [advice(5.5, checkpoint="never")],
        },
    )
    found = steps_of(fake, monkeypatch).tune(60.0, None)
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


def test_settings_with_which_a_step_fails_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake({"": 10, "chunks=4": -1}, {"": [advice(7, chunks=4)]})
    found = steps_of(fake, monkeypatch).tune(60.0, None)
    assert found.trials[1] == Trial({"chunks": 4}, 7, None, "RuntimeError: refused")
    assert found.settings == {}
    assert found.code == ""
    assert "RuntimeError: refused" in str(found)
    assert "Nothing that was tried is faster" in str(found)


def test_no_trial_begins_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake({"": 10}, {"": [advice(7, chunks=4)]})
    found = steps_of(fake, monkeypatch).tune(1e-9, None)
    assert fake.tried == [""]
    assert not found.is_complete
    assert "no time to try all advice" in str(found)


def test_a_real_pipeline() -> None:
    """Each micro-batch costs 5 ms, whatever its size, so that one micro-batch is the fastest."""
    pipe = GPipe(nn.Sequential(Sleep(5e-3, 0), nn.Linear(6, 4), Sleep(5e-3, 0)), [2, 1], chunks=8)
    settings = pipe.balance, pipe.chunks, pipe.checkpoint, pipe.schedule, pipe.threads_per_stage
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    found = gpipe_fast.tune(pipe, features(), target=torch.zeros(8, 4), loss_fn=F.mse_loss, seconds=5)
    assert isinstance(found, Tuning)
    assert found.settings["chunks"] < 8
    assert found.after < found.before
    assert settings == (pipe.balance, pipe.chunks, pipe.checkpoint, pipe.schedule, pipe.threads_per_stage)
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
    assert all(p.grad is None for p in pipe.parameters())
