"""The launchers that concatenate gradients, against the operators that they replace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpipe_fast.fuse.families import stacks
from tests.unit.kernels.numerics.comparison import check, needs_kernels, to_float64

FP16, FP32 = torch.float16, torch.float32


@pytest.mark.parametrize("packing", stacks.PACKINGS, ids=lambda packing: packing.name)
def test_one_concatenation_has_the_bits_of_the_gradients(packing: stacks.Packing) -> None:
    parts = [torch.randn(packing.shape) for _ in range(3)]
    (expected,) = packing.pattern(*parts)
    assert expected.shape == packing.packed
    # In memory, gradients of attention have heads before the last dimension.
    strided: list[Tensor] = [p.transpose(1, 2).contiguous().transpose(1, 2) for p in parts]
    for inputs in (parts, strided):
        (found,) = packing.launch({}, *inputs)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


@needs_kernels
@pytest.mark.parametrize("packing", [*stacks.PACKINGS, stacks.SPLIT], ids=lambda packing: packing.name)
def test_one_kernel_concatenates_the_gradients_and_sums_the_columns(packing: stacks.Packing) -> None:
    for dtype in (FP32, FP16):
        parts = [torch.randn(packing.shape).to(dtype) for _ in range(3)]
        expected = packing.pattern_with_sums(*parts)
        exact = packing.pattern_with_sums(*to_float64(parts))
        strided: list[Tensor] = [p.transpose(0, -1).contiguous().transpose(0, -1) for p in parts]
        for inputs in (parts, strided):
            found = packing.launch_with_sums({}, *inputs)
            check(found, expected, exact)
            assert torch.equal(found[0], expected[0])
            assert found[0].stride() == expected[0].stride()
