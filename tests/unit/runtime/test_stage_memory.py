"""What a stage needs: its tensors, in the blocks that the allocator of a device hands out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_fast.runtime.stage import Stage, StageOptions
from gpipe_fast.runtime.stage_memory import (
    block_bytes,
    buffer_bytes,
    gradient_bytes,
    parameter_bytes,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(("size", "block"), [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_blocks_on_a_gpu_are_multiples_of_512_bytes(size: int, block: int) -> None:
    assert block_bytes(size, GPU) == block
    assert block_bytes(size, CPU) == size


def test_tied_tensors_count_once() -> None:
    first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    first.register_buffer("table", torch.ones(3))
    last.register_buffer("table", first.table)
    stage = Stage([first, last], 0, CPU)
    assert parameter_bytes(stage) == 64
    assert buffer_bytes(stage) == 12
    assert parameter_bytes(Stage([first, last], 0, GPU)) == 512


def test_gradients_have_the_dtype_in_which_they_are_accumulated() -> None:
    layer = nn.Linear(4, 4, dtype=torch.bfloat16)
    options = StageOptions(False, torch.float32, False, False, False, ())
    assert gradient_bytes(Stage([layer], 0, CPU), layer.parameters()) == 2 * 20
    assert gradient_bytes(Stage([layer], 0, CPU, options=options), [layer.weight]) == 4 * 16
