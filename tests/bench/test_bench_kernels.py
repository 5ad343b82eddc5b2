"""The kernel benchmarks without a GPU: their cases compute what PyTorch computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.gpu import kernels
from bench.gpu import timing as gpu
from bench.gpu.case import DTYPES, AccuracyCheck
from bench.gpu.families import all_cases
from bench.gpu.variants import all_variants
from tools import traffic

pytestmark = pytest.mark.extended


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_every_kernel_family_has_benchmark_cases() -> None:
    assert {name.split()[0] for name in all_cases()} == {name.split()[0] for name in all_variants()}


@pytest.mark.parametrize("name", all_cases())
def test_a_fused_case_is_as_accurate_as_pytorch_and_moves_fewer_bytes(name: str) -> None:
    case = all_cases()[name]
    for dtype in DTYPES:
        inputs = case.inputs(1 << 14, DTYPES[dtype], "cpu")
        gradients = case.gradients(inputs)
        accuracy_check = AccuracyCheck.of(case, inputs, gradients)
        assert accuracy_check.error_ratio(gpu.ours(case, inputs, gradients).run()) <= 1
        if case.memory_bound:
            assert str(traffic.row(case, dtype)[-1])[0] != "-"


def one_microsecond_each(candidates: Mapping[str, gpu.Candidate], rounds: int) -> dict[str, list[float]]:
    for candidate in candidates.values():
        candidate.reset()
        candidate.run()
    return {name: [1.0] * rounds for name in candidates}


def test_a_right_kernel_is_timed_with_its_peers_and_a_wrong_one_is_not() -> None:
    case = all_cases()["cross_entropy mean"]
    small = replace(case, inputs=lambda _, dtype, device: case.inputs(1 << 14, dtype, device))
    options = {"device": "cpu", "backend": "aot_eager", "sample": one_microsecond_each}
    found = kernels.measure(small, "bf16", 1, **options)
    assert found.error_ratio[kernels.OURS] <= 1
    assert {kernels.OURS, kernels.EAGER, kernels.INDUCTOR, kernels.COPY} <= set(found.times)

    def wrong(logits: Tensor, target: Tensor, g: Tensor) -> object:
        return case.ours(logits * 1.1, target, g)

    found = kernels.measure(replace(small, ours=wrong), "bf16", 1, **options)
    assert found.times == {}
    assert str(found.row()[-1]).startswith("WRONG")
