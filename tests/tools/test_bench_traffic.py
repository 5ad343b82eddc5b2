"""Bytes read and written by kernels and PyTorch operators: benchmark counts, compared with manual counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bench.gpu.case import DTYPES
from bench.gpu.families import all_cases
from gpipe_fast.kernels.launch import Config, launch
from tools import traffic

pytestmark = pytest.mark.extended

ROWS = 4096
SIZES = {"fp32": 4, "bf16": 2}


def test_bytes_of_rotary_embedding() -> None:
    case, elements, tables = all_cases()["rotary"], 1 << 24, 2 * 2048 * 128
    # Forward and backward each read and write queries and keys, and read both tables.
    assert traffic.fused_bytes(case, elements, torch.bfloat16) == 2 * 2 * (2 * elements + tables)


def test_bytes_of_stacks() -> None:
    case, rows, cols = all_cases()["stack 3 parts"], 10 * 512, 3 * 16 * 64
    # A program sums 32 rows in fp32.
    partial_sums = rows // 32 * cols * 4
    found = traffic.fused_bytes(case, 1 << 24, torch.bfloat16)
    assert found == 2 * rows * cols * 2 + 2 * partial_sums + cols * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_cross_entropy(dtype: str) -> None:
    case, (rows, classes) = all_cases()["cross_entropy mean"], (ROWS, 32000)
    matrix = rows * classes * SIZES[dtype]
    unfused = traffic.unfused_bytes(case, rows * classes, DTYPES[dtype])
    fused = traffic.fused_bytes(case, rows * classes, DTYPES[dtype])
    # x, log p; the mostly zero gradient of log p; that gradient, log p and dx. Targets have 8 bytes.
    assert 2 * rows * 8 <= unfused - (2 + 1 + 3) * matrix < 32 * rows
    # The kernel works in place; targets are counted and looked up, and losses of 4 bytes added.
    assert (3 * 8 + 2 * 4) * rows <= fused - 2 * matrix < 48 * rows


@pytest.mark.parametrize(("rows", "chunks"), [(1000, 1), (4096, 4)])
def test_bytes_of_cross_entropy_in_chunks(rows: int, chunks: int) -> None:
    case, (classes, features) = all_cases()["cross_entropy mean, with the linear layer"], (32000, 1024)
    fp32, bf16 = (traffic.fused_bytes(case, rows * classes, dtype) for dtype in DTYPES.values())
    # x, logits; the kernel in place; dlogits, dx; dlogits, x.
    each_row = 2 * features + 5 * classes + features
    # Each chunk reads the weight twice, writes the weight gradient, and except the first reads it.
    weights = classes * features
    assert fp32 == 4 * (rows * each_row + weights * (4 * chunks - 1))
    # The weight gradient is accumulated in fp32 and then cast if there are several chunks.
    gradient = 4 * (2 * chunks - 1) + 4 + 2 if chunks > 1 else 2
    assert bf16 == 2 * rows * each_row + weights * (2 * 2 * chunks + gradient)


def test_a_case_may_count_its_own_bytes() -> None:
    case = all_cases()["mean_loss"]
    case = replace(case, moved=lambda inputs, gradients: sum(t.nbytes for t in (*inputs, *gradients)))
    assert traffic.fused_bytes(case, 100, torch.float32) == 100 * (4 + 8)


def count_bytes(function: Callable[[], object]) -> tuple[int, int]:
    with traffic.Traffic() as found:
        function()
    return found.read, found.written


def test_views_and_allocations_move_nothing() -> None:
    x = torch.empty(8, 16, device="meta")
    assert count_bytes(lambda: x.t().reshape(16, 8)[1:].chunk(3)) == (0, 0)
    assert count_bytes(lambda: (torch.empty_like(x), x.new_empty(3), torch.empty(4, device="meta"))) == (0, 0)
    assert count_bytes(lambda: torch.zeros(4, device="meta")) == (0, 16)


def test_an_operator_reads_a_storage_once_and_only_its_viewed_part() -> None:
    x = torch.empty(8, 16, device="meta")
    assert count_bytes(lambda: x + x) == (512, 512)
    assert count_bytes(lambda: x[:2] * x[6:]) == (256, 128)
    assert count_bytes(lambda: torch.mul(x[:, ::2], x[:, 1::2])) == (512, 256)
    assert count_bytes(lambda: x + x[:1]) == (512, 512)
    assert count_bytes(lambda: torch.ones(1, device="meta").expand(100).sum()) == (4, 8)


def test_in_place_operators_read_and_write() -> None:
    x, y = torch.empty(2, 100, device="meta")
    assert count_bytes(lambda: x.mul_(y)) == (800, 400)
    assert count_bytes(lambda: x.copy_(y)) == (400, 400)
    assert count_bytes(x.zero_) == (0, 400)
    assert count_bytes(lambda: torch._foreach_add_([x, y], 1.0)) == (800, 800)


def test_launches_read_existing_tensors_and_write_new_ones() -> None:
    x, y = (torch.empty(8, 16, device="meta") for _ in range(2))
    found = traffic.Traffic()
    with found.counting_launches([y]):
        made = torch.empty_like(x)
        launch(None, (1,), Config({}), x, x[:4], made, 7)
        assert (found.read, found.written) == (512, 512)
        launch(None, (1,), Config({}), made, 7)
        assert (found.read, found.written) == (1024, 512)
        launch(None, (1,), Config({}), y)
        assert (found.read, found.written) == (1536, 1024)
        launch(None, (0,), Config({}), y)
        assert found.moved == 2560
