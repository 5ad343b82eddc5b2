"""Gradients of many tensors in one launch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from gpipe_fast.kernels import accumulate_, accumulate_and_check_, addresses, multi_tensor, unscale_
from tests.kernels.numerics.comparison import DTYPES, check, every_dtype, needs_kernels, strided

pairs = pytest.mark.parametrize(("a_dtype", "g_dtype"), list(itertools.product(DTYPES, DTYPES)))
# Around blocks of 1024, and around 16 bytes.
SIZES = (1, 63, 0, 100, 1000, 1024, 1025, 4097, 2048, 7)
BAD = (float("inf"), float("-inf"), float("nan"))


def tensors(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(size).to(dtype) for size in SIZES]


def clones(xs: list[Tensor]) -> list[Tensor]:
    return [x.clone() for x in xs]


def same(ours: list[Tensor], others: list[Tensor]) -> None:
    for index, (own, other) in enumerate(zip(ours, others, strict=True)):
        assert own.dtype == other.dtype, index
        assert torch.equal(own.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0)), index


@pairs
def test_accumulated_as_by_pytorch(a_dtype: torch.dtype, g_dtype: torch.dtype) -> None:
    a, g = tensors(a_dtype), tensors(g_dtype)
    expected, kept = clones(a), clones(g)
    torch._foreach_add_(expected, g)
    accumulate_(a, g)
    same(a, expected)
    same(g, kept)


@every_dtype
@pytest.mark.parametrize("scale", [1.0, 2.0**-16, 1 / 3, 0.0])
def test_unscaled_as_by_pytorch(scale: float, dtype: torch.dtype) -> None:
    g = tensors(dtype)
    expected, inverse, found = clones(g), torch.tensor([scale]), torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(expected, found, inverse)
    assert torch.equal(unscale_(g, inverse), found)
    same(g, expected)


@every_dtype
@pytest.mark.parametrize("bad", BAD)
def test_one_bad_element_is_found_wherever_it_is(bad: float, dtype: torch.dtype) -> None:
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
            same(g, expected)


def test_what_is_around_is_neither_found_nor_written() -> None:
    around = torch.full((5000,), float("nan"))
    around[7:4104] = 1.0
    assert unscale_([around[7:4104]], torch.tensor([3.0])).item() == 0
    assert accumulate_and_check_([around[7:4104]], [torch.ones(4097)], torch.tensor([2.0])).item() == 0
    assert (around[7:4104] == 5).all()
    assert around[:7].isnan().all()
    assert around[4104:].isnan().all()


@pairs
def test_accumulated_and_checked(a_dtype: torch.dtype, g_dtype: torch.dtype) -> None:
    a, g, inverse = tensors(a_dtype), tensors(g_dtype), torch.tensor([1 / 3])
    wide = [x.double() + y.double() * inverse.double() for x, y in zip(a, g, strict=True)]
    eager = [(x + y.float() * inverse).to(x.dtype) for x, y in zip(a, g, strict=True)]
    found = torch.zeros(())
    assert accumulate_and_check_(a, g, inverse, found) is found
    assert found.item() == 0
    check(a, eager, wide)


def test_overflow_of_an_accumulator_is_found() -> None:
    a, g, inverse = torch.full((9,), 60000.0).half(), torch.full((9,), 6e4), torch.ones(1)
    assert accumulate_and_check_([a], [g], inverse).item() == 1


def test_what_was_found_stays() -> None:
    found, inverse = torch.ones(1), torch.ones(1)
    unscale_([torch.ones(3)], inverse, found)
    accumulate_and_check_([torch.ones(3)], [torch.ones(3)], inverse, found)
    assert found.item() == 1


@pairs
@pytest.mark.parametrize("start", [1, 3, 4, 8])
def test_views_that_are_not_aligned(start: int, a_dtype: torch.dtype, g_dtype: torch.dtype) -> None:
    for offsets in ((start, 0), (0, start), (start, start)):
        (base, g), size = (torch.randn(3000).to(dtype) for dtype in (a_dtype, g_dtype)), 2500
        expected = base.clone()
        expected[offsets[0] :][:size] += g[offsets[1] :][:size]
        accumulate_([base[offsets[0] :][:size]], [g[offsets[1] :][:size]])
        assert torch.equal(base, expected)


@every_dtype
def test_layouts(dtype: torch.dtype) -> None:
    def make() -> list[Tensor]:
        x = torch.randn(6, 40, 30).to(dtype)
        image = torch.randn(2, 3, 4, 5).to(dtype)
        return [
            strided(x), x.mT.clone(), x.mT, x.clone()[:, ::2],
            image.to(memory_format=torch.channels_last), x.clone().permute(2, 0, 1),
            torch.randn(1, 9).to(dtype).as_strided((1, 9), (77, 1)),
        ]  # fmt: skip

    a, g, inverse = make(), make(), torch.tensor([0.25])
    a[2] = a[2].contiguous()
    expected = [x + y for x, y in zip(a, g, strict=True)]
    accumulate_(a, g)
    same(a, expected)
    expected = [x + y * 0.25 for x, y in zip(a, g, strict=True)]
    assert accumulate_and_check_(a, g, inverse).item() == 0
    for own, other in zip(a, expected, strict=True):
        torch.testing.assert_close(own, other)
    others = make()
    expected = [x * 0.25 for x in others]
    others[1] = others[1].clone()
    assert unscale_(others, inverse).item() == 0
    same(others, expected)
    others[0][2, 3, 4] = float("nan")
    assert unscale_(others, inverse).item() == 1


@needs_kernels
def test_one_launch_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, launch = [], multi_tensor.launch

    def count(kernel: Any, grid: tuple[int], *rest: Any, **more: Any) -> None:
        launched.append(grid)
        launch(kernel, grid, *rest, **more)

    monkeypatch.setattr(multi_tensor, "launch", count)
    a, g = tensors(torch.float32), tensors(torch.float16)
    accumulate_(a, g)
    assert launched == [(sum(-(-size // 1024) for size in SIZES),)]
    accumulate_([*a, torch.ones(3)], [*g, torch.ones(3)])
    assert len(launched) == 3


def test_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_tensor, "choose", lambda count: multi_tensor.CONFIGS[1 << 62])
    a, g = (
        [torch.randn(size) for size in (5, 4096, 10_000)],
        [torch.randn(size) for size in (5, 4096, 10_000)],
    )
    expected = [x + y for x, y in zip(a, g, strict=True)]
    accumulate_(a, g)
    same(a, expected)


def test_a_table() -> None:
    found = addresses.table_of(torch.device("cpu"), 4096, (4, 2), ((1 << 20, 1 << 30, 5000), (64, 32, 100)))
    first, second = [1 << 20, (1 << 20) + 4 * 4096, 64], [1 << 30, (1 << 30) + 2 * 4096, 32]
    assert found.tolist() == [first, second, [4096, 904, 100]]


@needs_kernels
def test_tables_are_kept_by_address_and_size() -> None:
    addresses._table.cache_clear()
    base, g = torch.zeros(10_000), torch.ones(5000)
    for _ in range(3):
        accumulate_([base[:5000]], [g])
    assert addresses._table.cache_info().misses == 1
    accumulate_([base[5000:]], [g])
    accumulate_([base[:4999]], [g[:4999]])
    accumulate_([base[:2500].half()], [g[:2500]])
    assert addresses._table.cache_info().misses == 4
    assert base[:4999].eq(4).all()
    assert base[4999] == 3
    assert base[5000:].eq(1).all()
    # A tensor whose memory was replaced.
    grown = torch.zeros(5000)
    accumulate_([grown], [g])
    old, grown.data = grown.data, torch.full((5000,), 7.0)
    accumulate_([grown], [g])
    assert old.eq(1).all()
    assert grown.eq(8).all()


def test_an_accumulator_that_comes_twice_gets_both() -> None:
    a = torch.zeros(3000)
    g = [torch.ones(3000), torch.full((3000,), 2.0)]
    accumulate_([a, a], g)
    assert a.eq(3).all()
    # Two programs of one launch would race.
    assert addresses.reach([a, a], g, DTYPES)[1] == [1]


def test_nothing() -> None:
    inverse = torch.ones(1)
    accumulate_([], [])
    accumulate_([torch.ones(0, 3)], [torch.ones(0, 3)])
    assert unscale_([], inverse).tolist() == [0]
    assert unscale_([torch.ones(0)], inverse).tolist() == [0]
    assert accumulate_and_check_([], [], inverse).tolist() == [0]


def test_fp64_is_added_in_fp64() -> None:
    a, g = torch.randn(2, 100, dtype=torch.float64)
    expected = a + g
    accumulate_([a], [g])
    assert torch.equal(a, expected)
