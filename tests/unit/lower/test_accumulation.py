"""Gradient accumulation: pending accumulations, and the program step that runs several at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gpipe_fast._extension import ActiveRuns
from gpipe_fast.lower.accumulation import (
    MAX_COALESCED_GRADIENT_BYTES,
    MAX_PENDING_BYTES,
    AccumulationPolicy,
    PendingAccumulations,
    sum_dtype,
)
from gpipe_fast.lower.steps import Accumulate, AccumulateAll

LOW_PRECISION = (torch.bfloat16, torch.float16)
_accumulate_ = torch.ops.gpipe_fast._accumulate_.default


def fake_tensor(elements: int, device: str = "cuda", dtype: torch.dtype = torch.uint8) -> Tensor:
    """Returns a fake tensor, which has no memory."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(elements, device=device, dtype=dtype)


def test_only_low_precision_gradients_are_summed_in_another_dtype() -> None:
    for dtype in LOW_PRECISION:
        assert sum_dtype(dtype, torch.float32) is torch.float32
        assert sum_dtype(dtype, None) is dtype
        assert AccumulationPolicy(torch.float32).has_wider_accumulator(torch.empty(1, dtype=dtype))
        assert not AccumulationPolicy().has_wider_accumulator(torch.empty(1, dtype=dtype))
    for dtype in (torch.float32, torch.float64, torch.complex64):
        assert sum_dtype(dtype, torch.float32) is dtype


def test_gpu_products_accumulate_in_place_unless_deterministic() -> None:
    a, b = fake_tensor(16, dtype=torch.float32).view(4, 4), fake_tensor(16, dtype=torch.float32).view(4, 4)
    assert AccumulationPolicy().can_use_addmm(a, b)
    assert not AccumulationPolicy(deterministic=True).can_use_addmm(a, b)


def test_gradients_on_the_cpu_are_added_immediately() -> None:
    pending = PendingAccumulations()
    assert pending.add(0, 1, fake_tensor(4, "cpu")) == [Accumulate(0, 1, ActiveRuns.LATER)]
    assert pending.flush() == []


def test_on_a_gpu_small_gradients_are_deferred_and_large_ones_are_not() -> None:
    pending = PendingAccumulations()
    assert pending.add(0, 1, fake_tensor(MAX_COALESCED_GRADIENT_BYTES)) == []
    assert pending.add(2, 3, fake_tensor(MAX_COALESCED_GRADIENT_BYTES + 1)) == [
        Accumulate(2, 3, ActiveRuns.LATER)
    ]
    assert pending.add(4, 5, fake_tensor(1)) == []
    assert pending.flush() == [AccumulateAll((0, 4), (1, 5), ActiveRuns.LATER)]
    assert pending.flush() == []


def test_the_size_of_deferred_gradients_is_bounded() -> None:
    pending, capacity = PendingAccumulations(), MAX_PENDING_BYTES // MAX_COALESCED_GRADIENT_BYTES
    for i in range(capacity):
        assert pending.add(i, i, fake_tensor(MAX_COALESCED_GRADIENT_BYTES)) == []
    assert pending.add(capacity, capacity, fake_tensor(1)) == [
        AccumulateAll((*range(capacity),), (*range(capacity),), ActiveRuns.LATER)
    ]
    assert pending.flush() == [AccumulateAll((capacity,), (capacity,), ActiveRuns.LATER)]
