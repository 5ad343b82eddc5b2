"""Writable copies: the original's elements, strides, overlaps and alignment, and its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpipe_fast.runtime.python_state import writable_copy

MEMORY = torch.arange(64.0)
TENSORS = {
    "contiguous": MEMORY.view(8, 8),
    "transposed": MEMORY.view(8, 8).T,
    "with gaps": MEMORY[::2],
    "misaligned": MEMORY[1:9],
    "misaligned, with gaps": MEMORY[3:].as_strided((2, 3), (20, 2)),
    "expanded": MEMORY[1:4].expand(5, 3),
    "overlapping": MEMORY[2:].as_strided((4, 3), (2, 1)),
    "empty": MEMORY[:0],
    "half precision": MEMORY.half()[3:7],
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_copy_has_the_layout_and_the_alignment_of_the_original(name: str) -> None:
    tensor = TENSORS[name]
    copy = writable_copy(tensor)
    assert torch.equal(copy, tensor)
    assert copy.dtype == tensor.dtype
    if tensor.numel():
        assert copy.stride() == tensor.stride()
        assert (copy.data_ptr() - tensor.data_ptr()) % 64 == 0
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_a_copy_may_be_written_and_passes_gradients_on() -> None:
    x = torch.arange(9.0, requires_grad=True)
    original: Tensor = x[1:]
    copy = writable_copy(original)
    copy.mul_(2)
    copy.sum().backward()
    assert torch.equal(original, torch.arange(1.0, 9))
    assert torch.equal(x.grad, torch.tensor([0.0, *[2.0] * 8]))
