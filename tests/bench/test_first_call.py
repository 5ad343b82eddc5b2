"""The benchmark of first calls: it times every call, and reports medians."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench import process
from bench.micro import first_call
from bench.micro.first_call import Case
from examples.gpt.__main__ import gpt

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny() -> Case:
    tokens = [torch.zeros(4, length, dtype=torch.int64) for length in (4, 6, 5, 8)]
    return Case(gpt(8, 4, 2, 16), [(t, t) for t in tokens])


def test_every_call_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(first_call.MODELS, "tiny", tiny)
    found = first_call.calls("tiny")
    assert len(found) == 4
    assert all(0 < forward < step for forward, step, _ in found)


def test_rows_have_the_medians_of_processes() -> None:
    runs = [[[i, 2 * i, 3 * i] for i in (first, 1.0, 1.0)] for first in (5.0, 9.0, 7.0)]
    assert first_call.rows_of("gpt2", runs)[0][1:] == ["first call", "7.00", "14.00", "21.00"]


def test_the_models_are_sequences() -> None:
    case = first_call.lengths()
    assert isinstance(case.layers, nn.Sequential)
    assert len(case.batches) == max(first_call.CALLS["lengths"]["further lengths"]) + 1
    assert first_call.MODELS.keys() == first_call.CALLS.keys()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("after_optimizer", first_call.IMPORTS.values())
def test_the_import_is_timed_in_a_process_of_its_own(after_optimizer: bool) -> None:
    assert process.call("bench.micro.first_call:import_seconds", after_optimizer) > 0


def test_a_process_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"first_call:calls\('nothing',\) ended with 1"):
        process.call("bench.micro.first_call:calls", "nothing")
