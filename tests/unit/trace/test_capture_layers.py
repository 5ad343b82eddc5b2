"""Captures of single layers: the key of their inputs, and the tables that they leave unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast.torch_private.fake_tensors import FakeTensorMode
from gpipe_fast.trace.capture_layers import key_of_fake, tensors_restored
from tests.reference import check_step


def test_keys_differ_in_everything_that_a_trace_sees() -> None:
    with FakeTensorMode():
        x = torch.empty(3, 4)
        key = key_of_fake(x)
        assert key == key_of_fake(torch.empty(3, 4))
        others = [torch.empty(4, 3), torch.empty(4, 3).T, x.double(), torch.empty(3, 4, requires_grad=True)]
        others.append(torch.empty(3, 4, device="meta"))
    assert key not in map(key_of_fake, others)
    assert len({key_of_fake(other) for other in others}) == len(others)


def test_replaced_tensors_are_restored_after_an_error() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    weight, mean = layer[0].weight, layer[1].running_mean
    with pytest.raises(KeyError), tensors_restored([layer]):
        layer[0].weight = nn.Parameter(torch.zeros(2, 2))
        layer[1].running_mean = torch.ones(2)
        raise KeyError
    assert layer[0].weight is weight
    assert layer[1].running_mean is mean


class Gives(nn.Module):
    """Returns copies of its input by number; equal numbers give one tensor."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        copies = [x.cos(), x.sin(), x.exp()]
        return tuple(copies[number] for number in self.numbers)


class Act(nn.Module):
    """Replaces one of its inputs, so that the next layer may get others that are, or are not, one tensor."""

    def __init__(self, place: int, asks: bool) -> None:
        super().__init__()
        self.place, self.asks = place, asks

    def forward(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        factor = 1 + sum(a is b for a, b in itertools.pairwise(values)) if self.asks else 2
        new = torch.tanh(values[self.place]) * factor + values[0]
        return *values[: self.place], new, *values[self.place + 1 :]


class Add(nn.Module):
    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([value * (i + 1) for i, value in enumerate(values)]).sum(0)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("places", [(0, 0, 0), (0, 1, 2), (2, 2, 1), (1, 0, 0)])
@pytest.mark.parametrize("numbers", [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 1, 2)])
@pytest.mark.usefixtures("one_thread")
def test_equal_layers_that_are_given_a_tensor_several_times(
    numbers: tuple[int, ...], places: tuple[int, ...], asks: bool
) -> None:
    torch.manual_seed(0)
    acts = [Act(place, asks) for place in places]
    model = nn.Sequential(nn.Linear(4, 4), Gives(numbers), *acts, Add())
    for balance in ([6], [3, 3]):
        check_step(model, torch.randn(6, 4), chunks=2, balance=balance, budgets=(0.0,))
