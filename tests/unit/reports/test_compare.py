"""Steps of a pipeline beside those of its plain layers: the same gradients, and a table."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.reports import compare as module
from gpipe_fast.reports.compare import Comparison, compare
from tests.models import features

pytestmark = pytest.mark.filterwarnings("ignore:.*stages idle")
NAMES = ["the pipeline", "the plain layers", "the plain layers, 4 micro-batches"]
NAMES += ["torch.compile", "torch.compile, 4 micro-batches"]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def sum_of_squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def compared(*args: Any, compiled: Any = lambda layers: layers, load: float = 0.0) -> Comparison:
    """Compares without a compiler, which takes minutes."""
    loads = mock.Mock(return_value=(load, 0.0, 0.0))
    with mock.patch.object(torch, "compile", compiled), mock.patch.object(module.os, "getloadavg", loads):
        return compare(*args, rounds=2)


@pytest.mark.parametrize("has_loss", [False, True])
def test_all_have_the_same_gradients_and_the_model_is_as_before(has_loss: bool) -> None:
    pipe = GPipe(layers(), [2, 1], devices=["cpu"] * 2, chunks=4)
    gradients = [torch.full_like(p, 3.0) for p in pipe.parameters()]
    for parameter, gradient in zip(pipe.parameters(), gradients, strict=True):
        parameter.grad = gradient
    loss = (torch.randn(8, 4), F.mse_loss) if has_loss else ()
    found = compared(pipe, features(), *loss)
    assert [each.name for each in found.candidates] == NAMES
    assert all(len(each.seconds) == 2 and each.difference < 1e-5 for each in found.candidates)
    assert all(p.grad is g for p, g in zip(pipe.parameters(), gradients, strict=True))
    assert len(json.loads(json.dumps(found.to_dict()))["candidates"]) == 5
    assert all(name in str(found) for name in NAMES)
    assert "times as long as" in str(found)
    assert "Other programs" not in str(found)


def test_other_programs_and_failures_are_named() -> None:
    def fail(_: nn.Module) -> Any:
        return mock.Mock(side_effect=RuntimeError("no compiler\nmore"))

    pipe = GPipe(layers(), [2, 1], devices=["cpu"] * 2, chunks=4)
    text = str(compared(pipe, features(), compiled=fail, load=99.0))
    assert "Other programs are running: a load of 99.0" in text
    assert text.count("RuntimeError: no compiler") == 2


def test_another_loss_than_a_mean_shows_in_the_gradients() -> None:
    """A step refuses such a loss if it sees it; a sum that is passed as a mean it takes."""
    pipe = GPipe(layers(), [2, 1], devices=["cpu"] * 2, chunks=4)
    (_, plain, parts, *_) = compared(pipe, features(), torch.randn(8, 4), sum_of_squares).candidates
    assert plain.difference == 0
    assert parts.difference > 1e-3
