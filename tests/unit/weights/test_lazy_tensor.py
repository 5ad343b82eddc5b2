"""Lazy tensors: metadata without reading, and reads by copies and by other functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpipe_fast.weights.lazy_tensor import Entry, LazyTensor, Targets, entry_of

CPU = torch.device("cpu")


def lazy(value: Tensor, targets: Targets | None = None) -> tuple[LazyTensor, list[int]]:
    """Returns a lazy tensor, and a list that grows with each read."""
    reads: list[int] = []

    def read() -> Tensor:
        reads.append(1)
        return value

    return LazyTensor.of(Entry(entry_of(value).like, read), targets or Targets({})), reads


def test_metadata_is_known_without_reading() -> None:
    tensor, reads = lazy(torch.ones(2, 3))
    assert tensor.shape == tensor.size() == (2, 3)
    assert (tensor.size(0), len(tensor), tensor.dim(), tensor.ndim, tensor.numel()) == (2, 2, 2, 2, 6)
    assert (tensor.dtype, tensor.is_floating_point(), tensor.is_complex()) == (torch.float32, True, False)
    assert (tensor.is_meta, tensor.requires_grad) == (True, False)
    assert torch.overrides.is_tensor_like(tensor)
    assert not reads


@pytest.mark.parametrize(
    "function",
    [lambda x: x[0], lambda x: x.view(3, 2), lambda x: torch.cat([x, x]), lambda x: x.double() + x],
)
def test_results_of_other_functions_are_lazy_tensors(function: Callable[[Any], Tensor]) -> None:
    value = torch.arange(6.0).view(2, 3)
    expected = function(value)
    target = torch.empty_like(expected, device="meta")
    tensor, _ = lazy(value, Targets({id(target): CPU}))
    result = function(tensor)
    assert isinstance(result, LazyTensor)
    target.copy_(result)
    assert torch.equal(target, expected)
