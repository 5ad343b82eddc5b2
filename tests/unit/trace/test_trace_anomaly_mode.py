"""PyTorch traces in anomaly mode; users see its reports only of their own backwards."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe

pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def reports() -> Iterator[list[str]]:
    """Yields the reports of anomaly mode, once the block has ended."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(each.message) for each in caught if "Error detected in" in str(each.message)]


def hardshrink() -> GPipe:
    """Returns a pipeline with a layer whose backward cannot be traced with symbols for sizes."""
    return GPipe(nn.Sequential(nn.Linear(6, 6), nn.Hardshrink()), [2], chunks=2)


def test_a_trace_that_fails_is_not_reported() -> None:
    pipe = hardshrink()
    with reports() as found:
        for size in (8, 16, 24):
            pipe(torch.randn(size, 6)).sum().backward()
    assert found == []


def test_anomaly_mode_of_the_user_reports_a_backward_that_fails() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(context: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("planted")

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = Fails.apply(x)
            return y

    pipe = GPipe(nn.Sequential(nn.Linear(6, 6), Layer()), [2], chunks=2, backend="eager")
    with reports() as found, torch.autograd.detect_anomaly(check_nan=False):
        output = pipe(torch.randn(8, 6)).sum()
        with pytest.raises(ValueError, match="planted"):
            output.backward()
    assert any("FailsBackward" in each for each in found)
