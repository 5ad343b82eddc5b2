"""What a stage needs: its tensors, in the blocks that the allocator of a device hands out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.runtime import stage_memory
from gpipe_fast.runtime.stage import Stage, StageOptions, TensorSpec
from gpipe_fast.runtime.stage_memory import (
    StageBytes,
    block_bytes,
    buffer_bytes,
    gradient_bytes,
    parameter_bytes,
    spec_bytes,
)
from gpipe_fast.schedule import Kind
from tests.models import features, mlp

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


def test_gaps_between_elements_count() -> None:
    specs = [
        TensorSpec.of(torch.empty(4, 8)[:, ::2], False),
        TensorSpec.of(torch.empty(3).expand(5, 3), False),
    ]
    assert spec_bytes(specs[:1], CPU) == 4 * (3 * 8 + 6 + 1)
    assert spec_bytes(specs, CPU) == 4 * 31 + 4 * 3
    assert spec_bytes(specs, GPU) == 1024


def test_the_total_is_the_sum() -> None:
    assert StageBytes(*range(1, 9)).total == 36


def test_the_halves_of_a_backward_free_what_the_whole_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages after the first send the gradients of inputs before they compute those of parameters."""
    found, sizes_of = [], stage_memory._sizes

    def noted(*args: Any) -> Any:
        found.append(sizes_of(*args))
        return found[-1]

    monkeypatch.setattr(stage_memory, "_sizes", noted)
    GPipe(mlp(), [2, 3], chunks=2, checkpoint="never").memory(features().to("meta"), device="cuda")
    for own in found:
        for is_first in (False, True):
            whole, inputs, weights = (own.backwards[kind, is_first] for kind in (Kind.B, Kind.I, Kind.W))
            assert inputs.freed + weights.freed == whole.freed == own.freed
            assert inputs.stays + weights.stays == whole.stays == 0
            assert inputs.most <= whole.most
    assert any(own.freed > 0 for own in found)
    assert len(found) == 2
