"""Captures of single layers: the key of their inputs, and the tables that they leave unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_fast.torch_private.fake_tensors import FakeTensorMode
from gpipe_fast.trace.capture_layers import key_of_fake, tensors_restored


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
