"""The span of strided tensors, compared with the memory that PyTorch allocates for them."""

from __future__ import annotations

import pytest
import torch

from gpipe_fast.strides import span


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((), (), 1),
        ((5,), (1,), 5),
        ((2, 3), (3, 1), 6),
        ((2, 3), (4, 1), 7),
        ((2, 3), (1, 2), 6),
        ((8, 6), (0, 1), 6),
        ((4, 3), (1, 1), 6),
        ((1, 3), (99, 1), 3),
        ((0,), (1,), 0),
        ((3, 0, 2), (2, 2, 1), 0),
    ],
)
def test_span_equals_the_memory_that_pytorch_allocates(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: int
) -> None:
    tensor = torch.empty_strided(shape, strides, dtype=torch.uint8)
    assert span(tensor.shape, tensor.stride()) == expected == tensor.untyped_storage().nbytes()
