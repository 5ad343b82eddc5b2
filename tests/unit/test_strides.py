"""The span of strided tensors, compared with the memory that PyTorch allocates for them."""

from __future__ import annotations

import pytest
import torch

from gpipe_fast.strides import may_overlap, overlaps_itself, span


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


@pytest.mark.parametrize("seed", range(4))
def test_overlaps_are_found(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(200):
        shape = tuple(torch.randint(1, 4, (3,), generator=generator).tolist())
        strides = tuple(torch.randint(0, 7, (3,), generator=generator).tolist())
        offset = int(torch.randint(0, 20, (), generator=generator))
        memory = torch.arange(64)
        a, b = memory.as_strided(shape, strides), memory.as_strided(shape, strides, offset)
        elements = set(a.flatten().tolist())
        assert overlaps_itself(shape, strides) or len(elements) == a.numel()
        shares = not elements.isdisjoint(b.flatten().tolist())
        assert may_overlap((shape, strides, 0), (shape, strides, offset)) >= shares
        if 0 not in strides:
            assert may_overlap((shape, strides, 0), (shape, strides, offset)) == shares
