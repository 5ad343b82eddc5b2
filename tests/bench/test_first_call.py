"""The benchmark of first calls: it times parts without the parts inside of them, and reports medians."""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bench.micro import first_call, first_call_parts, first_call_process
from bench.micro.first_call_parts import OTHER, PARTS, Times
from bench.micro.first_call_process import Case
from examples.gpt.__main__ import gpt

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny() -> Case:
    layers = gpt(8, 4, 2, 16)
    tokens = [torch.zeros(4, length, dtype=torch.int64) for length in (4, 6, 5, 8)]
    return Case(layers, [3, 3], [(t, t) for t in tokens])


@pytest.fixture
def one_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (first_call_process, first_call_parts):
        monkeypatch.setattr(module, "MODELS", {"tiny": tiny})
    monkeypatch.setattr(sys, "argv", ["first_call", "tiny"])


@pytest.mark.usefixtures("one_tiny_model")
def test_every_call_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    first_call_process.main()
    found = json.loads(capsys.readouterr().out)
    assert len(found["steps"]) == 4
    assert all(0 < step["forward"] < step["step"] for step in found["steps"])


@pytest.mark.usefixtures("one_tiny_model")
def test_the_parts_of_each_call_are_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name, _ in PARTS:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored after the test
    first_call_parts.main()
    first, _, third, further = json.loads(capsys.readouterr().out)
    assert {"trace", "join equal layers", "split", "lower", "build C++ programs", OTHER} <= first.keys()
    assert {"trace", "verify the template", "lower with formulas"} <= third.keys()
    assert "derive from formulas" in further
    assert "trace" not in further


def test_a_part_is_timed_without_the_parts_inside_of_it() -> None:
    def work() -> None:
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass

    owner = SimpleNamespace(inner=work)
    owner.outer = lambda: owner.inner()
    times = Times()
    times.wrap(owner, "inner", "inner")
    times.wrap(owner, "outer", "outer")
    owner.outer()
    assert times["inner"] >= 0.02
    assert 0 <= times["outer"] < times["inner"]


def test_rows_have_the_medians_of_processes() -> None:
    runs = [
        {"steps": [{"forward": i, "step": 2 * i, "processor": 3 * i} for i in (first, 1, 1)]}
        for first in (5, 9, 7)
    ]
    assert first_call.rows_of("gpt2", "now", runs)[0][1:] == ["first call", "now", "7.00", "14.00", "21.00"]


def test_the_models_are_sequences_with_a_balance() -> None:
    case = first_call_process.lengths()
    assert isinstance(case.layers, nn.Sequential)
    assert sum(case.balance) == len(case.layers)
    assert set(first_call.MODELS) == set(first_call_process.MODELS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", first_call.IMPORTS.values())
def test_the_import_is_timed_in_a_process_of_its_own(options: tuple[str, ...]) -> None:
    assert first_call.run(first_call.ROOT, "import", *options).keys() == {"import"}
