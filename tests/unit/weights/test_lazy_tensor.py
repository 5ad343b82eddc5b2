"""Lazy tensors: metadata without reading, and reads by copies and by other functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast.weights.lazy_tensor import Entry, LazyTensor, Targets, entry_of, replace

CPU = torch.device("cpu")


def lazy(value: Tensor, targets: Targets | None = None) -> tuple[LazyTensor, list[int]]:
    """Returns a lazy tensor, and a list that grows with each read."""
    reads: list[int] = []

    def read() -> Tensor:
        reads.append(1)
        return value

    return LazyTensor.of(Entry(entry_of(value).like, read), targets or Targets({})), reads


@pytest.mark.parametrize(
    "metadata",
    [
        lambda x: x.shape == (2, 3) and x.size() == (2, 3) and x.size(0) == len(x) == 2,
        lambda x: x.dtype == torch.float32 and x.is_floating_point() and not x.is_complex(),
        lambda x: x.is_meta and x.dim() == x.ndim == 2 and x.numel() == 6 and not x.requires_grad,
        torch.overrides.is_tensor_like,
    ],
)
def test_metadata_is_known_without_reading(metadata: Callable[[Tensor], bool]) -> None:
    tensor, reads = lazy(torch.ones(2, 3))
    assert metadata(tensor)
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


def test_a_copy_gives_data_to_a_meta_tensor() -> None:
    target = nn.Parameter(torch.empty(2, 3, device="meta", dtype=torch.half), requires_grad=False)
    targets = Targets({id(target): CPU})
    tensor, reads = lazy(torch.arange(6.0).view(2, 3), targets)
    other = target
    assert target.copy_(tensor) is target
    assert other.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (other.dtype, type(other), other.requires_grad) == (torch.half, nn.Parameter, False)
    assert targets.copied == {id(target)}
    assert len(reads) == 1


def test_a_trial_notes_copies_and_reads_nothing() -> None:
    on_meta, with_data = torch.empty(2, device="meta"), torch.zeros(2)
    targets = Targets({id(on_meta): CPU, id(with_data): CPU}, is_trial=True)
    tensor, reads = lazy(torch.ones(2), targets)
    for target in (on_meta, with_data):
        target.copy_(tensor)
    assert on_meta.is_meta
    assert with_data.tolist() == [0, 0]
    assert targets.copied == {id(on_meta), id(with_data)}
    assert not reads


def test_a_failed_read_leaves_the_target_on_the_meta_device() -> None:
    def read() -> Tensor:
        raise OSError("gone")

    target = torch.empty(2, device="meta")
    targets = Targets({id(target): CPU})
    with pytest.raises(OSError, match="gone"):
        target.copy_(LazyTensor.of(Entry(torch.empty(2, device="meta"), read), targets))
    assert target.is_meta
    assert not targets.copied


def test_replacing_keeps_attributes() -> None:
    target = nn.Parameter(torch.empty(2, device="meta"))
    target.label = "kept"
    replace(target, torch.ones(2))
    assert target.label == "kept"
    assert target.tolist() == [1, 1]
    (target * 3).sum().backward()
    assert target.grad.tolist() == [3, 3]
