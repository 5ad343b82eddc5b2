"""Tests of kernels that need a GPU, in addition to test_numerics.py."""

from __future__ import annotations

import pytest
import torch

from bench import gpu
from bench.case import AccuracyCheck
from bench.families import all_cases
from gpipe_fast.kernels import bias_activation_backward

pytestmark = pytest.mark.cuda

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The smallest size in benchmarks, a size for which the last block of a row is partial, and a large size.
NUM_ELEMENTS = (1 << 20, 1_234_567, 1 << 24)

every_case = pytest.mark.parametrize("name", all_cases())


@pytest.fixture(autouse=True)
def seed_generator() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("num_elements", NUM_ELEMENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@every_case
def test_every_kernel_is_within_twice_the_error_of_pytorch(
    name: str, dtype: torch.dtype, num_elements: int
) -> None:
    case = all_cases()[name]
    inputs = case.inputs(num_elements, dtype, "cuda")
    gradients = case.gradients(inputs)
    accuracy_check = AccuracyCheck.of(case, inputs, gradients)
    assert accuracy_check.error_ratio(gpu.ours(case, inputs, gradients).run()) <= 1


@every_case
def test_every_kernel_compiled_by_inductor_equals_the_eager_one(name: str) -> None:
    case = all_cases()[name]
    inputs = case.inputs(1 << 20, torch.bfloat16, "cuda")
    gradients = case.gradients(inputs)
    wanted = gpu.ours(case, inputs, gradients).run()
    compiled = torch.compile(case.fused, fullgraph=True)
    found = gpu.candidate_on_copies(compiled, inputs, gradients).run()
    assert all(w is f is None or torch.equal(w, f) for w, f in zip(wanted, found, strict=True))


def test_bias_activation_backward_addresses_more_than_2_to_the_31_elements() -> None:
    rows, cols = (1 << 31) // 4096 + 64, 4096
    if torch.cuda.mem_get_info()[0] < 5 * 2 * rows * cols:
        pytest.skip("needs 20 GiB")
    z, g = (torch.randn(rows, cols, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    found = bias_activation_backward(z, None, g, "gelu")
    wanted = bias_activation_backward(z[-64:], None, g[-64:], "gelu")
    for whole, end in zip(found[:2], wanted[:2], strict=True):
        assert whole is not None
        assert end is not None
        assert torch.equal(whole[-64:], end)
