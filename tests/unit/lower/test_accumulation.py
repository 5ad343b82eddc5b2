"""Gradient accumulation: pending accumulations, and the program step that runs several at once."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gpipe_fast._extension import ActiveRuns, Arena, Layout, Program
from gpipe_fast.lower.accumulation import (
    MAX_COALESCED_GRADIENT_BYTES,
    MAX_PENDING_BYTES,
    AccumulationPolicy,
    PendingAccumulations,
    sum_dtype,
)
from gpipe_fast.lower.steps import Accumulate, AccumulateAll

CPU = torch.device("cpu")
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


def test_several_gradients_are_added_in_one_step() -> None:
    """Later runs add each value to its accumulator; the pairs differ in dtypes and strides."""
    program = Program(Arena(), CPU)
    layouts = [
        Layout((3,), (1,), torch.float32),
        Layout((2, 2), (1, 2), torch.float32),
        Layout((), (), torch.float64),
    ]
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    shapes: tuple[tuple[int, ...], ...] = ((3,), (2, 2), ())
    values = [
        program.add_input(Layout(shape, torch.empty(shape, device="meta").stride(), dtype), False)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    accumulators = [program.add_accumulator(i, layout) for i, layout in enumerate(layouts)]
    for accumulator in accumulators:
        program.add_allocate(accumulator, ActiveRuns.FIRST)
    program.add_accumulate_all(accumulators, values, ActiveRuns.LATER)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=generator).to(d) for s, d in zip(shapes, dtypes, strict=True)]
    before: list[Tensor | None] = [
        torch.zeros(3),
        torch.ones(2, 2).t(),
        torch.tensor(2.0, dtype=torch.float64),
    ]
    expected = [b.clone() + g for b, g in zip(before, inputs, strict=True) if b is not None]
    _, after = program.run(inputs, before, False)
    for ours, theirs in zip(after, expected, strict=True):
        assert ours is not None
        assert torch.equal(ours, theirs)


def test_a_step_with_fewer_values_than_accumulators_is_refused() -> None:
    program = Program(Arena(), CPU)
    layout = Layout((3,), (1,), torch.float32)
    accumulator = program.add_accumulator(0, layout)
    with pytest.raises(RuntimeError, match="1 accumulators, but 0 values"):
        program.add_accumulate_all([accumulator], [], ActiveRuns.LATER)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "dtypes", list(itertools.product(LOW_PRECISION, (torch.float32, *LOW_PRECISION))), ids=str
)
def test_cuda_many_gradients_are_added_while_capturing(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Adds more gradients than one launch takes, one of them with other strides; replays add them again."""
    value_dtype, accumulator_dtype = dtypes
    generator = torch.Generator().manual_seed(0)
    sizes = [*range(1, 300), 100_003]
    values = [torch.randn(s, generator=generator).to("cuda", value_dtype) for s in sizes]
    values.append(torch.randn(5, 7, generator=generator).to("cuda", value_dtype).t())
    accumulators = [torch.ones(v.shape, device="cuda", dtype=accumulator_dtype) for v in values]
    expected = [a.clone() for a in accumulators]
    _accumulate_(accumulators, values)  # loads the kernels before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _accumulate_(accumulators, values)
    for _ in range(3):
        graph.replay()
    for total, value in zip(expected, values, strict=True):
        for _ in range(4):
            total.add_(value)
    assert all(map(torch.equal, accumulators, expected))


@pytest.mark.cuda
def test_cuda_a_product_accumulates_without_a_temporary() -> None:
    """Allocates no temporary; the error against float64 is at most twice that of a product and a sum."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator).cuda() for _ in range(2))
    total = torch.randn(512, 512, generator=generator).cuda()
    exact = total.double() + a.double() @ b.double()
    plain = total + a @ b
    free = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.addmm(total, a, b, out=total)
    assert torch.cuda.max_memory_allocated() - free < total.nbytes
    assert (total - exact).abs().max() <= 2 * (plain - exact).abs().max()
