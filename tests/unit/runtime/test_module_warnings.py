"""Warnings that a module raises once: about attention with dropout, and numbers that change."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe, doctor, replicate
from gpipe_fast.randomness import random
from gpipe_fast.runtime.module_warnings import log_graph
from gpipe_fast.runtime.stage import Stage, TensorSpec
from tests.internals import compiler_of


def _encoder(dropout: float) -> nn.Sequential:
    layers = (nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True) for _ in range(2))
    return nn.Sequential(nn.Linear(8, 8), *layers)


@pytest.fixture
def keyed_as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes attention draw by key as on a GPU, although it runs on the CPU."""
    make = random.KeyedRandomMode.__init__

    def make_unfused(mode: random.KeyedRandomMode, *args: Any, **named: Any) -> None:
        make(mode, *args, **named)
        mode._attention = random._UnfusedAttention()

    monkeypatch.setattr(random.KeyedRandomMode, "__init__", make_unfused)
    monkeypatch.setattr(random, "_is_on_gpu", lambda query: True)


@pytest.mark.usefixtures("keyed_as_on_gpu")
def test_attention_with_dropout_warns_once() -> None:
    pipe, x = GPipe(_encoder(0.1), [1, 2], chunks=8), torch.randn(8, 5, 8)
    with pytest.warns(UserWarning, match=r"stage 1, layer 1 .* and 1 more: attention with dropout") as warned:
        pipe(x).sum().backward()
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(x[:, :4]).sum().backward()
    assert "avoidable costs\n  stage 1, layer 1" in doctor(pipe)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, number: Any, flag: bool = False) -> torch.Tensor:
        return self.linear(x) * number + flag


def scaled() -> GPipe:
    return GPipe(nn.Sequential(Scaled(), nn.Linear(4, 4)), [1, 1], chunks=8)


def test_a_number_that_changes_warns_once_at_its_third_value() -> None:
    pipe, x = scaled(), torch.randn(8, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in (2, 2.5, 2):
            pipe(x, number)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in (3, 4, 5):
            pipe(x, number)
    (warning,) = caught
    assert "the number 3 among the inputs had other values" in str(warning.message)
    assert "gpipe_fast.replicate(torch.tensor(3))" in str(warning.message)


def test_only_calls_that_differ_in_one_number_are_compared() -> None:
    pipe = scaled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows, number, flag in (
            (8, 1, False),
            (9, 1, False),
            (10, 1, True),
            (11, 2, True),
            (8, True, True),
        ):
            pipe(torch.randn(rows, 4), number, flag)


def test_the_advised_tensor_is_traced_once_and_has_the_same_bits() -> None:
    pipe, x = scaled(), torch.randn(8, 4)
    found = [pipe(x, replicate(torch.tensor(number))) for number in (2, 3)]
    num_traces = compiler_of(pipe).num_traces
    found.append(pipe(x, replicate(torch.tensor(4))))
    assert compiler_of(pipe).num_traces == num_traces
    for number, output in zip((2, 3, 4), found, strict=True):
        assert torch.equal(output, scaled_by_loop(pipe, x, number))


def scaled_by_loop(pipe: GPipe, x: torch.Tensor, number: int) -> torch.Tensor:
    first, second = pipe.children()
    return torch.cat([second(first(part, number)) for part in x.chunk(8)])


def test_too_many_numbers_are_not_blamed_on_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpipe_fast.runtime.planner.MAX_TRACES", 3)
    pipe, x = scaled(), torch.randn(8, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(5):
            pipe(x, number)
    (text,) = [str(each.message) for each in caught if "was not traced for" in str(each.message)]
    assert "pass numbers that change as tensors" in text
    assert "pad" not in text


CPU = torch.device("cpu")


def part(first: int, size: int) -> Stage:
    return Stage([nn.Linear(2, 2) for _ in range(size)], first, CPU)


def test_graphs_are_logged_for_debugging_alone(caplog: pytest.LogCaptureFixture) -> None:
    specs = [TensorSpec.of(torch.empty(shape), False) for shape in ((8, 2), (3,))]
    with caplog.at_level(logging.INFO, "gpipe_fast"):
        log_graph(part(0, 2), "traced", specs)
    assert caplog.messages == []
    with caplog.at_level(logging.DEBUG, "gpipe_fast"):
        log_graph(part(0, 2), "traced", specs)
        log_graph(part(5, 1), "reused")
    assert caplog.messages == ["layers 0 to 1: traced, for [8, 2], [3]", "layer 5: reused"]
