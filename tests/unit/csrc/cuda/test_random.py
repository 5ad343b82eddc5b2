"""Keyed draws on a GPU equal those on the CPU bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpipe_fast.randomness.random import NO_LAYER, make_key

pytestmark = pytest.mark.cuda

keyed = torch.ops.gpipe_fast
FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
KEYS = [(0, 0, 0), (-(2**63), 2**32 - 1, 0), (0x0123456789ABCDEF, 7, 12), (-1, 1, 65000)]
# Sizes around a block of words, a block of threads, and one pass of all threads.
SIZES = (0, 1, 3, 4, 5, 1023, 1025, 100_003, 3_000_001)

Draw, Key = Callable[..., Tensor], tuple[int, int, int]


def check_equal(op: Draw, size: int, key: Key, layer: int, *arguments: float, dtype: torch.dtype) -> None:
    host_key, place = make_key(*key), (layer, 3, [size], *arguments)
    expected = op(host_key, *place, dtype=dtype, device=torch.device("cpu"))
    found = op(host_key.cuda(), *place, dtype=dtype, device=torch.device("cuda", 0))
    assert found.is_cuda
    if dtype == torch.float64 and op in (keyed.keyed_normal, keyed.keyed_exponential):
        # CUDA's math library rounds logarithms and sines differently.
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-13, atol=1e-15)
    else:
        assert torch.equal(found.cpu(), expected)
    with_key_on_gpu = op(host_key.cuda(), *place, dtype=dtype, device=torch.device("cpu"))
    assert torch.equal(with_key_on_gpu, found.cpu())  # drawn where the key is


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_cuda_floating_point_draws_equal_those_on_the_cpu(dtype: torch.dtype, size: int) -> None:
    for key in KEYS:
        check_equal(keyed.keyed_uniform, size, key, 5, -1.5, 2.25, dtype=dtype)
        check_equal(keyed.keyed_normal, size, key, 5, 0.5, 2.0, dtype=dtype)
        check_equal(keyed.keyed_exponential, size, key, NO_LAYER, 0.7, dtype=dtype)


@pytest.mark.parametrize("dtype", [*FLOATING, *INTEGERS], ids=str)
def test_cuda_bernoulli_draws_equal_those_on_the_cpu(dtype: torch.dtype) -> None:
    for p in (0.0, 2.0**-33, 2.0**-32, 0.3, 1 - 2.0**-33, 1.0):
        for size in (1, 4097):
            check_equal(keyed.keyed_bernoulli, size, KEYS[2], 5, p, dtype=dtype)


@pytest.mark.parametrize("dtype", [*FLOATING, *INTEGERS], ids=str)
def test_cuda_integer_draws_equal_those_on_the_cpu(dtype: torch.dtype) -> None:
    for smallest, largest in ((0, 1), (0, 100), (0, 0)):
        check_equal(keyed.keyed_integer, 4097, KEYS[2], 5, smallest, largest, dtype=dtype)
    if dtype == torch.int64:
        check_equal(keyed.keyed_integer, 4097, KEYS[2], 5, -(2**63), 2**63 - 1, dtype=dtype)
