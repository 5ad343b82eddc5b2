"""What a stage needs: its tensors, in the blocks that the allocator of a device hands out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.layers.quantized import is_quantized, parts_of
from gpipe_fast.runtime.stage import Stage, StageOptions
from gpipe_fast.runtime.stage_memory import (
    block_bytes,
    buffer_bytes,
    gradient_bytes,
    parameter_bytes,
)
from tests.quantized import HIDDEN, KINDS, WIDTH, blocks

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


@pytest.mark.parametrize("kind", ["own", "NF4", "torchao int8"])
def test_quantized_weights_count_as_they_are_stored_and_one_of_them_dequantized(kind: str) -> None:
    model = blocks(KINDS[kind])
    stage = Stage([*model[:2]], 0, CPU)
    weights = [p for p in model[:2].parameters() if is_quantized(p)]
    assert len(weights) == 6
    others = sum(p.nbytes for p in model[:2].parameters() if not is_quantized(p))
    parts = {part for p in weights for part in parts_of(p).values()}
    own = sum(0 if kind.startswith("torchao") else p.nbytes for p in weights)
    assert parameter_bytes(stage) == others + own + sum(part.nbytes for part in parts)
    pipe = GPipe(model, balance=[2, 2], chunks=8)
    needed = pipe.memory(torch.randn(8, WIDTH)).stages[0]
    assert needed is not None
    assert needed.parameters == parameter_bytes(stage)
    # With one token in a micro-batch, hardly anything else is as large.
    assert WIDTH * HIDDEN * 4 <= needed.intermediates < 2 * WIDTH * HIDDEN * 4
