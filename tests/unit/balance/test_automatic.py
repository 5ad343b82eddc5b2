"""Automatic balances of layers of known cost, compared with torchgpipe's."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.balance import balance_by_cost, balance_by_size, balance_by_time
from gpipe_fast.balance.automatic import default_balance
from gpipe_fast.layers.structure import CallArguments
from tests import models
from tests.unit.balance.timed_layers import Clock, TimedLayer, sequence
from tests.unit.test_profile import Pop, Stash


@pytest.mark.parametrize("costs", [[1, 1, 1, 1], [1, 2, 3, 4, 5, 6], [1, 1, 9, 1, 1], [0.01, 0.9]])
def test_balance_by_time_finds_the_optimal_partition(
    costs: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sequence(Clock().install(monkeypatch), *costs)
    found = balance_by_time(2, model, torch.randn(4), device="cpu")
    assert found == balance_by_cost(2, costs)


def test_balance_by_time_counts_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().install(monkeypatch)
    model = nn.Sequential(TimedLayer(clock, 1, 9), TimedLayer(clock, 2, 1), TimedLayer(clock, 4, 1))
    assert balance_by_time(2, model, torch.randn(4), device="cpu") == [1, 2]


def test_skips_and_in_place_layers_are_balanced() -> None:
    layers = nn.Linear(6, 6), nn.ReLU(inplace=True), Stash(), Pop(), nn.Dropout(0.5, inplace=True)
    model, x = nn.Sequential(*layers), models.features()
    for found in (
        balance_by_time(2, model, x, timeout=0.0, device="cpu"),
        balance_by_size(2, model, x, chunks=2, device="cpu"),
    ):
        assert (len(found), sum(found)) == (2, 5)
        assert GPipe(model, found, chunks=4)(x).shape == (8, 6)


def test_balance_by_size_weighs_activations_and_parameters() -> None:
    """Elements for a micro-batch of 8: inputs 8 x 4, 8 x 100, 8 x 4, 8 x 4; weights 400, 400, 16, 16."""
    widths = [4, 100, 4, 4, 4]
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)]
    model, x = nn.Sequential(*layers), torch.randn(16, 4)
    for chunks, scale in itertools.product((1, 2, 16), (0.0, 2.0, 5.0)):
        samples = 16 // chunks
        costs = [
            samples * width + scale * weights for width, weights in ((4, 400), (100, 400), (4, 16), (4, 16))
        ]
        found = balance_by_size(2, model, x, chunks=chunks, param_scale=scale, device="cpu")
        assert found == balance_by_cost(2, costs)


def test_balance_by_size_runs_layers_that_need_more_than_one_sample() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())
    assert sum(balance_by_size(2, model, models.features(), chunks=4, device="cpu")) == 3


def test_the_automatic_balance_is_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sequence(Clock().install(monkeypatch), 1, 1, 9, 1, 1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # gradients exist between two steps
    assert default_balance(3, model, torch.randn(4), device="cpu") == [2, 1, 2]
    assert default_balance(9, model, torch.randn(4), device="cpu") == [1] * 5
    assert default_balance(2, nn.Sequential(), torch.randn(4), device="cpu") == []


def test_the_automatic_balance_takes_several_arguments() -> None:
    model = nn.Sequential(nn.Bilinear(6, 6, 6), nn.Linear(6, 6))
    sample = CallArguments((models.features(), models.features()), {})
    assert default_balance(2, model, sample, timeout=0.0, device="cpu") == [1, 1]
