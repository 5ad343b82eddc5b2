"""The check that layers fit into the memory of their devices, on simulated GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpipe_fast.layers import device_memory
from gpipe_fast.layers.device_memory import (
    check_layers_fit,
    check_partitions_fit,
    min_training_bytes,
)

GPU = torch.device("cuda:0")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Returns a function that sets the total and the free bytes of GPU memory."""

    def set_memory(total: int, free: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))

    return set_memory


def partition(width: int = 1024) -> list[tuple[str, nn.Module]]:
    """Returns a partition with 4 MiB of parameters."""
    return [("0", nn.Linear(width, width, bias=False))]


MIB = 1 << 20


def test_memory_of_stages_on_one_gpu_adds_up(memory: Callable[[int, int], None]) -> None:
    memory(16 * MIB, 16 * MIB)
    check_partitions_fit([partition(), partition()], [GPU, GPU])
    memory(15 * MIB, 15 * MIB)
    check_partitions_fit([partition(), partition()], [GPU, torch.device("cuda:1")])
    with pytest.raises(ValueError, match=r"stages 0, 1 need 0\.0 GiB for parameters, .* and cuda:0 has 0\.0"):
        check_partitions_fit([partition(), partition()], [GPU, GPU])
    check_partitions_fit([partition(), partition()], [torch.device("cpu")] * 2)


def test_moved_parameters_must_fit_into_free_memory(memory: Callable[[int, int], None]) -> None:
    memory(16 * MIB, 4 * MIB)
    check_partitions_fit([partition()], [GPU])
    memory(16 * MIB, 4 * MIB - 1)
    with pytest.raises(ValueError, match=r"stages 0 move 0\.0 GiB .* to cuda:0, which has 0\.0 GiB free of"):
        check_partitions_fit([partition()], [GPU])


def test_unused_memory_of_the_allocator_is_free(
    memory: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory(16 * MIB, 3 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 * MIB)
    check_partitions_fit([partition()], [GPU])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 * MIB + 1)
    with pytest.raises(ValueError, match="stages 0 move"):
        check_partitions_fit([partition()], [GPU])


def test_gradients_count_for_parameters_that_require_them() -> None:
    layer = nn.BatchNorm1d(4)
    buffers = 2 * 16 + 8  # running mean and variance in float32, and the number of batches in int64
    assert min_training_bytes(layer) == 2 * 2 * 16 + buffers
    layer.weight.requires_grad_(False)
    assert min_training_bytes(layer) == 16 + 2 * 16 + buffers


def test_a_layer_that_is_too_large_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, cpu = nn.Linear(1024, 1024, bias=False), torch.device("cpu")
    monkeypatch.setattr(device_memory, "device_memory_bytes", lambda device: 8 * MIB)
    check_layers_fit([("0", layer)], cpu)
    monkeypatch.setattr(device_memory, "device_memory_bytes", lambda device: 8 * MIB - 1)
    with pytest.raises(ValueError, match=r"layer '7' \(Linear\) needs 0\.0 GiB .* and cpu has 0\.0 GiB"):
        check_layers_fit([("7", layer)], cpu)
