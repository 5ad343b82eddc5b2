"""Bytes read and written by kernels and PyTorch operators: benchmark counts, compared with manual counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.gpu import traffic
from bench.gpu.families import all_cases
from gpipe_fast.kernels.launch import Config, launch

pytestmark = pytest.mark.extended


def test_bytes_of_rotary_embedding() -> None:
    case, elements, tables = all_cases()["rotary"], 1 << 24, 2 * 2048 * 128
    # Forward and backward each read and write queries and keys, and read both tables.
    assert traffic.fused_bytes(case, elements, torch.bfloat16) == 2 * 2 * (2 * elements + tables)


def count_bytes(function: Callable[[], object]) -> tuple[int, int]:
    with traffic.Traffic() as found:
        function()
    return found.read, found.written


def test_an_operator_reads_a_storage_once_and_only_its_viewed_part() -> None:
    x = torch.empty(8, 16, device="meta")
    assert count_bytes(lambda: x.t().reshape(16, 8)[1:].chunk(3)) == (0, 0)
    assert count_bytes(lambda: torch.zeros(4, device="meta")) == (0, 16)
    assert count_bytes(lambda: x + x) == (512, 512)
    assert count_bytes(lambda: x[:2] * x[6:]) == (256, 128)
    assert count_bytes(lambda: torch.mul(x[:, ::2], x[:, 1::2])) == (512, 256)
    assert count_bytes(lambda: x[:4].mul_(x[4:])) == (512, 256)
    assert count_bytes(lambda: torch._foreach_add_([x[:4], x[4:]], 1.0)) == (512, 512)


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
