"""The cache of plans: equal calls share a plan, and every difference makes another."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from tests.internals import latest_plan, num_plans, plan_of


def pipeline() -> GPipe:
    torch.manual_seed(0)
    return GPipe(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 4)), [2, 1], chunks=4)


def test_equal_calls_share_a_plan() -> None:
    pipe = pipeline()
    plan = plan_of(pipe, torch.randn(8, 6))
    pipe(torch.randn(8, 6))
    assert latest_plan(pipe) is plan
    assert num_plans(pipe) == 1


CHANGES: dict[str, Callable[[GPipe], object]] = {
    "mode": lambda pipe: pipe.eval(),
    "attribute": lambda pipe: setattr(pipe[1], "p", 0.25),
    "frozen parameter": lambda pipe: pipe[0].weight.requires_grad_(False),
    "chunks": lambda pipe: setattr(pipe, "chunks", 2),
    "checkpoint": lambda pipe: setattr(pipe, "checkpoint", "never"),
    "threads": lambda pipe: setattr(pipe, "threads_per_stage", 3),
}


def test_the_log_says_what_differs_from_the_latest_call(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(8, 6)
    named = {
        "mode": "the state of layers [0, 1, 2]",
        "attribute": "the state of layers [1]",
        "frozen parameter": "the state of layers [0]",
        "chunks": "chunks",
        "checkpoint": "checkpoint",
        "threads": "threads",
    }
    for name, change in CHANGES.items():
        pipe = pipeline()
        plan_of(pipe, x)
        change(pipe)
        with caplog.at_level(logging.DEBUG, "gpipe_fast"):
            plan_of(pipe, x)
        assert caplog.messages[0].startswith("a new plan;")
        assert named[name] in caplog.messages[0]
        assert ("chunks" in caplog.messages[0]) == (name == "chunks")
        caplog.clear()


def test_other_inputs_and_modes_make_another_plan() -> None:
    pipe, x = pipeline(), torch.randn(8, 6)
    plan = plan_of(pipe, x)
    others = torch.randn(12, 6), torch.randn(8, 6, requires_grad=True), torch.randn(6, 8).t()
    assert all(plan_of(pipe, other) is not plan for other in others)
    with torch.no_grad():
        assert plan_of(pipe, x) is not plan
    with torch.autocast("cpu", torch.bfloat16):
        assert plan_of(pipe, x) is not plan
    assert plan_of(pipe, x) is plan
    assert num_plans(pipe) == 6
