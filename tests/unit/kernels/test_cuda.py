"""The cases of the kernel families: on a GPU, in addition to test_numerics.py, and by the CPU's path."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.cases import CASES
from tools.variants import all_variants

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# A size in millions, one for which the last block of a row is partial, and a large one.
NUM_ELEMENTS = (1 << 20, 1_234_567, 1 << 24)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True)
def seed_generator() -> None:
    torch.manual_seed(0)


@pytest.mark.cuda
@pytest.mark.parametrize("num_elements", NUM_ELEMENTS)
@every_dtype
@every_case
def test_every_kernel_is_within_twice_the_error_of_pytorch(
    name: str, dtype: torch.dtype, num_elements: int
) -> None:
    CASES[name].check(num_elements, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@every_case
def test_the_path_of_the_cpu_is_within_twice_the_error_of_pytorch(name: str, dtype: torch.dtype) -> None:
    CASES[name].check(1 << 14, dtype, "cpu")


def test_every_family_has_cases_and_variants() -> None:
    assert {name.split()[0] for name in CASES} == {name.split()[0] for name in all_variants()}


# Launchers without an operator are called by C++ alone.
@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("cross_entropy")])
def test_every_operator_compiled_by_inductor_equals_the_eager_one(name: str) -> None:
    case = CASES[name]
    inputs = case.inputs(1 << 20, torch.bfloat16, "cuda")
    gradients = case.gradients(inputs)
    wanted = case.fused(inputs, gradients)
    found = case.fused(inputs, gradients, torch.compile(case.ours, fullgraph=True))
    assert all(w is f is None or torch.equal(w, f) for w, f in zip(wanted, found, strict=True))
