"""Operations on the gradients of many tensors in one launch, against PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from gpipe_fast.kernels import accumulate_, accumulate_and_check_, addresses, multi_tensor, unscale_
from tests.kernels.numerics.comparison import DTYPES, check, every_dtype, needs_kernels, noncontiguous

every_dtype_pair = pytest.mark.parametrize(("a_dtype", "g_dtype"), list(itertools.product(DTYPES, DTYPES)))
# Around the block size of 1024 elements, and around 16 bytes.
SIZES = (1, 63, 0, 100, 1000, 1024, 1025, 4097, 2048, 7)
NON_FINITE = (float("inf"), float("-inf"), float("nan"))


def random_tensors(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(size).to(dtype) for size in SIZES]


def clones(xs: list[Tensor]) -> list[Tensor]:
    return [x.clone() for x in xs]


def assert_equal_lists(ours: list[Tensor], others: list[Tensor]) -> None:
    for index, (own, other) in enumerate(zip(ours, others, strict=True)):
        assert own.dtype == other.dtype, index
        assert torch.equal(own.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0)), index


@every_dtype_pair
def test_accumulate_equals_pytorch(a_dtype: torch.dtype, g_dtype: torch.dtype) -> None:
    a, g = random_tensors(a_dtype), random_tensors(g_dtype)
    expected, kept = clones(a), clones(g)
    torch._foreach_add_(expected, g)
    accumulate_(a, g)
    assert_equal_lists(a, expected)
    assert_equal_lists(g, kept)


@every_dtype
@pytest.mark.parametrize("scale", [1.0, 2.0**-16, 1 / 3, 0.0])
def test_unscale_equals_pytorch(scale: float, dtype: torch.dtype) -> None:
    g = random_tensors(dtype)
    expected, inverse, found = clones(g), torch.tensor([scale]), torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(expected, found, inverse)
    assert torch.equal(unscale_(g, inverse), found)
    assert_equal_lists(g, expected)


@every_dtype
@pytest.mark.parametrize("bad", NON_FINITE)
def test_one_non_finite_element_is_found_at_every_position(bad: float, dtype: torch.dtype) -> None:
    inverse = torch.tensor(0.5)
    for size in (1, 63, 1024, 2049):
        for position in {0, size // 2, size - 1}:
            g = [torch.randn(5).to(dtype), torch.randn(size).to(dtype), torch.randn(3).to(dtype)]
            a = [torch.randn_like(x) for x in g]
            g[1][position] = bad
            assert accumulate_and_check_(a, g, inverse).item() == 1, (size, position)
            assert a[1].isfinite().logical_not().nonzero().tolist() == [[position]]
            expected, found = clones(g), torch.zeros(1)
            torch._amp_foreach_non_finite_check_and_unscale_(expected, found, inverse)
            assert unscale_(g, inverse).item() == 1 == found.item(), (size, position)
            assert_equal_lists(g, expected)


def test_elements_outside_of_a_view_are_neither_checked_nor_written() -> None:
    buffer = torch.full((5000,), float("nan"))
    buffer[7:4104] = 1.0
    assert unscale_([buffer[7:4104]], torch.tensor([3.0])).item() == 0
    assert accumulate_and_check_([buffer[7:4104]], [torch.ones(4097)], torch.tensor([2.0])).item() == 0
    assert (buffer[7:4104] == 5).all()
    assert buffer[:7].isnan().all()
    assert buffer[4104:].isnan().all()


@every_dtype_pair
def test_accumulate_and_check_matches_pytorch(a_dtype: torch.dtype, g_dtype: torch.dtype) -> None:
    a, g, inverse = random_tensors(a_dtype), random_tensors(g_dtype), torch.tensor([1 / 3])
    wide = [x.double() + y.double() * inverse.double() for x, y in zip(a, g, strict=True)]
    eager = [(x + y.float() * inverse).to(x.dtype) for x, y in zip(a, g, strict=True)]
    found = torch.zeros(())
    assert accumulate_and_check_(a, g, inverse, found) is found
    assert found.item() == 0
    check(a, eager, wide)


def test_an_overflow_of_an_accumulator_is_found() -> None:
    a, g, inverse = torch.full((9,), 60000.0).half(), torch.full((9,), 6e4), torch.ones(1)
    assert accumulate_and_check_([a], [g], inverse).item() == 1


def test_found_inf_stays_set() -> None:
    found, inverse = torch.ones(1), torch.ones(1)
    unscale_([torch.ones(3)], inverse, found)
    accumulate_and_check_([torch.ones(3)], [torch.ones(3)], inverse, found)
    assert found.item() == 1


@every_dtype_pair
@pytest.mark.parametrize("start", [1, 3, 4, 8])
def test_accumulate_into_unaligned_views_equals_pytorch(
    start: int, a_dtype: torch.dtype, g_dtype: torch.dtype
) -> None:
    for offsets in ((start, 0), (0, start), (start, start)):
        (base, g), size = (torch.randn(3000).to(dtype) for dtype in (a_dtype, g_dtype)), 2500
        expected = base.clone()
        expected[offsets[0] :][:size] += g[offsets[1] :][:size]
        accumulate_([base[offsets[0] :][:size]], [g[offsets[1] :][:size]])
        assert torch.equal(base, expected)


@every_dtype
def test_multi_tensor_functions_accept_every_layout(dtype: torch.dtype) -> None:
    def tensors_of_many_layouts() -> list[Tensor]:
        x = torch.randn(6, 40, 30).to(dtype)
        image = torch.randn(2, 3, 4, 5).to(dtype)
        return [
            noncontiguous(x), x.mT.clone(), x.mT, x.clone()[:, ::2],
            image.to(memory_format=torch.channels_last), x.clone().permute(2, 0, 1),
            torch.randn(1, 9).to(dtype).as_strided((1, 9), (77, 1)),
        ]  # fmt: skip

    a, g, inverse = tensors_of_many_layouts(), tensors_of_many_layouts(), torch.tensor([0.25])
    a[2] = a[2].contiguous()
    expected = [x + y for x, y in zip(a, g, strict=True)]
    accumulate_(a, g)
    assert_equal_lists(a, expected)
    expected = [x + y * 0.25 for x, y in zip(a, g, strict=True)]
    assert accumulate_and_check_(a, g, inverse).item() == 0
    for own, other in zip(a, expected, strict=True):
        torch.testing.assert_close(own, other)
    others = tensors_of_many_layouts()
    expected = [x * 0.25 for x in others]
    others[1] = others[1].clone()
    assert unscale_(others, inverse).item() == 0
    assert_equal_lists(others, expected)
    others[0][2, 3, 4] = float("nan")
    assert unscale_(others, inverse).item() == 1


@needs_kernels
def test_tensors_of_one_dtype_pair_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, launch = [], multi_tensor.launch

    def count(kernel: Any, grid: tuple[int], *rest: Any, **more: Any) -> None:
        launched.append(grid)
        launch(kernel, grid, *rest, **more)

    monkeypatch.setattr(multi_tensor, "launch", count)
    a, g = random_tensors(torch.float32), random_tensors(torch.float16)
    accumulate_(a, g)
    assert launched == [(sum(-(-size // 1024) for size in SIZES),)]
    accumulate_([*a, torch.ones(3)], [*g, torch.ones(3)])
    assert len(launched) == 3


def test_accumulate_in_large_blocks_equals_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_tensor, "choose", lambda count: multi_tensor.CONFIGS[1 << 62])
    a, g = (
        [torch.randn(size) for size in (5, 4096, 10_000)],
        [torch.randn(size) for size in (5, 4096, 10_000)],
    )
    expected = [x + y for x, y in zip(a, g, strict=True)]
    accumulate_(a, g)
    assert_equal_lists(a, expected)


def test_an_address_table_has_one_column_per_program() -> None:
    found = addresses.address_table(
        torch.device("cpu"), 4096, (4, 2), ((1 << 20, 1 << 30, 5000), (64, 32, 100))
    )
    first, second = [1 << 20, (1 << 20) + 4 * 4096, 64], [1 << 30, (1 << 30) + 2 * 4096, 32]
    assert found.tolist() == [first, second, [4096, 904, 100]]


@needs_kernels
def test_address_tables_are_cached_by_address_and_size() -> None:
    addresses._build_table.cache_clear()
    base, g = torch.zeros(10_000), torch.ones(5000)
    for _ in range(3):
        accumulate_([base[:5000]], [g])
    assert addresses._build_table.cache_info().misses == 1
    accumulate_([base[5000:]], [g])
    accumulate_([base[:4999]], [g[:4999]])
    accumulate_([base[:2500].half()], [g[:2500]])
    assert addresses._build_table.cache_info().misses == 4
    assert base[:4999].eq(4).all()
    assert base[4999] == 3
    assert base[5000:].eq(1).all()
    # After a tensor's memory is replaced, its table is not used again.
    grown = torch.zeros(5000)
    accumulate_([grown], [g])
    old, grown.data = grown.data, torch.full((5000,), 7.0)
    accumulate_([grown], [g])
    assert old.eq(1).all()
    assert grown.eq(8).all()


def test_an_accumulator_that_is_listed_twice_gets_both_gradients() -> None:
    a = torch.zeros(3000)
    g = [torch.ones(3000), torch.full((3000,), 2.0)]
    accumulate_([a, a], g)
    assert a.eq(3).all()
    # In one launch, two programs would race.
    assert addresses.group_spans([a, a], g, DTYPES)[1] == [1]


def test_multi_tensor_functions_accept_no_elements() -> None:
    inverse = torch.ones(1)
    accumulate_([], [])
    accumulate_([torch.ones(0, 3)], [torch.ones(0, 3)])
    assert unscale_([], inverse).tolist() == [0]
    assert unscale_([torch.ones(0)], inverse).tolist() == [0]
    assert accumulate_and_check_([], [], inverse).tolist() == [0]


def test_fp64_gradients_are_accumulated_in_fp64() -> None:
    a, g = torch.randn(2, 100, dtype=torch.float64)
    expected = a + g
    accumulate_([a], [g])
    assert torch.equal(a, expected)
