"""The span and the overlaps of strided tensors, compared with the memory that PyTorch allocates."""

from __future__ import annotations

import torch

from gpipe_fast.strides import may_overlap, overlaps_itself, span


def test_spans_and_overlaps_are_those_of_the_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    memory = torch.arange(64)
    assert span((), ()) == 1
    for _ in range(1000):
        shape = tuple(torch.randint(0, 4, (3,), generator=generator).tolist())
        strides = tuple(torch.randint(0, 7, (3,), generator=generator).tolist())
        offset = int(torch.randint(0, 20, (), generator=generator))
        a, b = memory.as_strided(shape, strides), memory.as_strided(shape, strides, offset)
        allocated = torch.empty_strided(shape, strides, dtype=torch.uint8).untyped_storage().nbytes()
        assert span(shape, strides) == allocated
        elements = set(a.flatten().tolist())
        assert overlaps_itself(shape, strides) or len(elements) == a.numel()
        shares = not elements.isdisjoint(b.flatten().tolist())
        assert may_overlap((shape, strides, 0), (shape, strides, offset)) >= shares
        if 0 not in (*strides, *shape):
            assert may_overlap((shape, strides, 0), (shape, strides, offset)) == shares
