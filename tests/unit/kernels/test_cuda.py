"""Tests of kernels that need a GPU, in addition to test_numerics.py."""

from __future__ import annotations

import pytest
import torch

from bench.gpu import timing as gpu
from bench.gpu.case import AccuracyCheck
from bench.gpu.families import all_cases

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


# Launchers without an operator are called by C++ alone.
@pytest.mark.parametrize("name", [name for name in all_cases() if name.startswith("cross_entropy")])
def test_every_operator_compiled_by_inductor_equals_the_eager_one(name: str) -> None:
    case = all_cases()[name]
    inputs = case.inputs(1 << 20, torch.bfloat16, "cuda")
    gradients = case.gradients(inputs)
    wanted = gpu.ours(case, inputs, gradients).run()
    compiled = torch.compile(case.fused, fullgraph=True)
    found = gpu.candidate_on_copies(compiled, inputs, gradients).run()
    assert all(w is f is None or torch.equal(w, f) for w, f in zip(wanted, found, strict=True))
