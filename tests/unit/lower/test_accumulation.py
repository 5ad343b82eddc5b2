"""How gradients are added up: what waits for what, and the step of a program that adds several at once."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gpipe_fast._extension import Arena, Layout, Program, When
from gpipe_fast.lower.accumulation import LARGE, WAITING, Accumulation, Waiting, sum_dtype
from gpipe_fast.lower.program import Accumulate, AccumulateAll

CPU = torch.device("cpu")
LOWER = (torch.bfloat16, torch.float16)
_accumulate_ = torch.ops.gpipe_fast._accumulate_.default


def like(elements: int, device: str = "cuda", dtype: torch.dtype = torch.uint8) -> Tensor:
    """A tensor that is nowhere."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(elements, device=device, dtype=dtype)


def test_what_is_added_in_more_precision() -> None:
    for own in LOWER:
        assert sum_dtype(own, torch.float32) is torch.float32
        assert sum_dtype(own, None) is own
        assert Accumulation(torch.float32).is_higher(torch.empty(1, dtype=own))
        assert not Accumulation().is_higher(torch.empty(1, dtype=own))
    for own in (torch.float32, torch.float64, torch.complex64):
        assert sum_dtype(own, torch.float32) is own


def test_products_on_a_gpu_add_to_gradients_unless_bits_are_wanted() -> None:
    a, b = like(16, dtype=torch.float32).view(4, 4), like(16, dtype=torch.float32).view(4, 4)
    assert Accumulation().in_product(a, b)
    assert not Accumulation(deterministic=True).in_product(a, b)


def test_on_the_cpu_nothing_waits() -> None:
    waiting = Waiting()
    assert waiting.add(0, 1, like(4, "cpu")) == [Accumulate(0, 1, When.LATER)]
    assert waiting.done() == []


def test_on_a_gpu_small_ones_wait_and_large_ones_do_not() -> None:
    waiting = Waiting()
    assert waiting.add(0, 1, like(LARGE)) == []
    assert waiting.add(2, 3, like(LARGE + 1)) == [Accumulate(2, 3, When.LATER)]
    assert waiting.add(4, 5, like(1)) == []
    assert waiting.done() == [AccumulateAll((0, 4), (1, 5), When.LATER)]
    assert waiting.done() == []


def test_no_more_waits_than_may() -> None:
    waiting, most = Waiting(), WAITING // LARGE
    for i in range(most):
        assert waiting.add(i, i, like(LARGE)) == []
    assert waiting.add(most, most, like(1)) == [AccumulateAll((*range(most),), (*range(most),), When.LATER)]
    assert waiting.done() == [AccumulateAll((most,), (most,), When.LATER)]


def test_a_step_that_adds_several() -> None:
    """In later runs: to each accumulator its value, whatever their dtypes and strides."""
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
        program.add_make(accumulator, When.FIRST)
    program.add_accumulate_all(accumulators, values, When.LATER)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(s, generator=generator).to(d) for s, d in zip(shapes, dtypes, strict=True)]
    before: list[Tensor | None] = [
        torch.zeros(3),
        torch.ones(2, 2).t(),
        torch.tensor(2.0, dtype=torch.float64),
    ]
    expected = [b.clone() + g for b, g in zip(before, given, strict=True) if b is not None]
    _, after = program.run(given, before, False)
    for own, wanted in zip(after, expected, strict=True):
        assert own is not None
        assert torch.equal(own, wanted)


def test_a_step_needs_as_many_values_as_accumulators() -> None:
    program = Program(Arena(), CPU)
    layout = Layout((3,), (1,), torch.float32)
    accumulator = program.add_accumulator(0, layout)
    with pytest.raises(RuntimeError, match="1 accumulators, but 0 values"):
        program.add_accumulate_all([accumulator], [], When.LATER)


@pytest.mark.cuda
@pytest.mark.parametrize("dtypes", list(itertools.product(LOWER, (torch.float32, *LOWER))), ids=str)
def test_cuda_many_at_once_while_capturing(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """More than one launch takes, of which one is laid out otherwise; replayed, they are added again."""
    value_dtype, accumulator_dtype = dtypes
    generator = torch.Generator().manual_seed(0)
    sizes = [*range(1, 300), 100_003]
    values = [torch.randn(s, generator=generator).to("cuda", value_dtype) for s in sizes]
    values.append(torch.randn(5, 7, generator=generator).to("cuda", value_dtype).t())
    accumulators = [torch.ones(v.shape, device="cuda", dtype=accumulator_dtype) for v in values]
    expected = [a.clone() for a in accumulators]
    _accumulate_(accumulators, values)  # so that kernels are loaded
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
def test_cuda_a_product_adds_to_a_gradient() -> None:
    """No temporary, and no more error against float64 than twice that of a product and a sum."""
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
