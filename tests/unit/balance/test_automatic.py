"""Automatic balances of layers of known cost, compared with torchgpipe's."""

from __future__ import annotations

import itertools
import types
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.balance import balance_by_cost, balance_by_size, balance_by_time
from gpipe_fast.balance.automatic import default_balance
from gpipe_fast.layers.skip import pop, skippable, stash
from gpipe_fast.layers.structure import CallArguments
from tests import models
from tests.unit.balance.timed_layers import Clock, TimedLayer, sequence

torchgpipe_balance = pytest.importorskip("torchgpipe.balance")

COSTS: list[list[float]] = [
    [1, 1, 1, 1],
    [1, 2, 3, 4, 5, 6],
    [6, 5, 4, 3, 2, 1],
    [1, 1, 9, 1, 1],
    [0.01, 0.9],
]


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("partitions", [1, 2])
def test_balance_by_time_finds_the_optimal_partition(
    costs: list[float], partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sequence(Clock().install(monkeypatch), *costs)
    found = balance_by_time(partitions, model, torch.randn(4), device="cpu")
    assert found == balance_by_cost(partitions, costs)


def test_balance_by_time_counts_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().install(monkeypatch)
    model = nn.Sequential(TimedLayer(clock, 1, 9), TimedLayer(clock, 2, 1), TimedLayer(clock, 4, 1))
    assert balance_by_time(2, model, torch.randn(4), device="cpu") == [1, 2]


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("partitions", [1, 2])
def test_balance_by_time_is_no_worse_than_torchgpipe(
    costs: list[float], partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock().install(monkeypatch)
    monkeypatch.setattr(torchgpipe_balance.profile, "time", types.SimpleNamespace(time=clock))
    model, x = sequence(clock, *costs), torch.randn(4)
    theirs = torchgpipe_balance.balance_by_time(partitions, model, x, device="cpu")
    ours = balance_by_time(partitions, model, x, device="cpu")

    def max_cost(sizes: list[int]) -> float:
        ends = [0, *itertools.accumulate(sizes)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))

    assert max_cost(ours) <= max_cost(theirs)
    if len(set(costs)) == 1 or len(costs) == 2:  # the optimum is unique, and torchgpipe finds it
        assert ours == theirs


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Generator[stash, None, tuple[Tensor, Tensor]]:
        yield stash("skip", x)
        return x, x.new_ones((), dtype=torch.long)


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Generator[pop, Any, Tensor]:
        skip: Tensor = yield pop("skip")
        return value[0] + skip


def unusual_layers() -> nn.Sequential:
    """Skip connections, tuples, and layers that write to their inputs."""
    return nn.Sequential(
        nn.Linear(6, 6), nn.ReLU(inplace=True), Stash(), Pop(), nn.Dropout(0.5, inplace=True)
    )


@pytest.mark.parametrize("partitions", [1, 2, 5])
def test_skips_tuples_and_in_place_layers_are_balanced(partitions: int) -> None:
    model, x = unusual_layers(), models.features()
    by_time = balance_by_time(partitions, model, x, timeout=0.0, device="cpu")
    by_size = balance_by_size(partitions, model, x, chunks=2, device="cpu")
    for found in (by_time, by_size):
        assert len(found) == partitions
        assert sum(found) == 5
        assert min(found) >= 1


def test_a_pipeline_accepts_a_measured_balance() -> None:
    model = models.mlp()
    pipe = GPipe(model, balance_by_time(2, model, models.features(2), timeout=0.0, device="cpu"), chunks=4)
    assert pipe(models.features()).shape == (8, 4)


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


def test_balance_by_size_has_torchgpipes_default_param_scale() -> None:
    layers = [nn.Linear(4, 100, bias=False), nn.Linear(100, 4, bias=False), nn.Linear(4, 4, bias=False)]
    model, x = nn.Sequential(*layers), torch.randn(4, 4)
    assert balance_by_size(2, model, x) == balance_by_size(2, model, x, param_scale=2.0)


def test_balance_by_size_runs_layers_that_need_more_than_one_sample() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())
    assert sum(balance_by_size(2, model, models.features(), chunks=4, device="cpu")) == 3


@pytest.mark.parametrize("function", [balance_by_time, balance_by_size])
def test_error_messages_begin_as_torchgpipes(function: Any) -> None:
    model, x = nn.Sequential(nn.Linear(1, 1)), torch.rand(1, 1)
    theirs = torchgpipe_balance.balance_by_time
    for partitions in (0, 2):
        with pytest.raises(ValueError) as wanted:
            theirs(partitions, model, x, timeout=0.1, device="cpu")
        with pytest.raises(ValueError) as found:
            function(partitions, model, x, device="cpu")
        assert str(found.value).startswith(str(wanted.value))


@pytest.mark.parametrize("function", [balance_by_time, balance_by_size, default_balance])
def test_a_module_that_is_not_sequential_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match=r"^module must be nn.Sequential to be partitioned, got Linear$"):
        function(1, nn.Linear(1, 1), torch.rand(1, 1))


def test_balance_by_size_refuses_zero_chunks() -> None:
    with pytest.raises(ValueError, match=r"^number of chunks must be positive integer, got 0$"):
        balance_by_size(1, models.mlp(), models.features(), chunks=0)


def test_layers_are_timed_with_the_thread_count_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class RecordsThreads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            return x

    model, x = nn.Sequential(RecordsThreads(), RecordsThreads(), RecordsThreads()), torch.randn(4)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(6)
        balance_by_time(3, model, x, timeout=0.0, device="cpu")
        assert set(seen) == {2}
        seen.clear()
        default_balance(2, model, x, timeout=0.0, threads=1, device="cpu")
        assert set(seen) == {1}
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)


def test_the_automatic_balance_is_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sequence(Clock().install(monkeypatch), 1, 1, 9, 1, 1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # gradients exist between two steps
    assert default_balance(3, model, torch.randn(4), device="cpu") == [2, 1, 2]
    assert default_balance(9, model, torch.randn(4), device="cpu") == [1] * 5
    assert default_balance(2, nn.Sequential(), torch.randn(4), device="cpu") == []
    with pytest.raises(ValueError, match=r"^partitions must be a positive integer \(0 < 1\)$"):
        default_balance(0, model, torch.randn(4), device="cpu")


def test_the_automatic_balance_takes_several_arguments() -> None:
    model = nn.Sequential(nn.Bilinear(6, 6, 6), nn.Linear(6, 6))
    sample = CallArguments((models.features(), models.features()), {})
    assert default_balance(2, model, sample, timeout=0.0, device="cpu") == [1, 1]
