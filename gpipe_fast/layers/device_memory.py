"""Checks that layers fit into the memory of their devices."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from gpipe_fast.layers.quantized import stored_bytes
from gpipe_fast.layers.structure import layer_title


def device_memory_bytes(device: torch.device) -> int:
    """Returns the total memory of a device in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def min_training_bytes(layer: nn.Module) -> int:
    """Returns the bytes of a layer's parameters, their gradients and buffers; activations are excluded."""
    parameters = sum(
        stored_bytes(p) * (2 if p.requires_grad else 1) for p in _initialized(layer.parameters())
    )
    return parameters + sum(buffer.nbytes for buffer in _initialized(layer.buffers()))


def _initialized(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    return (tensor for tensor in tensors if not nn.parameter.is_lazy(tensor))


def check_layers_fit(layers: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
    """Checks that each layer fits on the device.

    Raises:
        ValueError: a layer is larger than the device; the message names the layer.
    """
    for name, layer in layers:
        needed, available = min_training_bytes(layer), device_memory_bytes(device)
        if needed > available:
            raise ValueError(
                f"{layer_title(name, layer)} needs {_gib(needed)} for parameters, their gradients and "
                f"buffers alone, and {device} has {_gib(available)}; split the layer into several, or use a "
                "larger device"
            )


def check_layers_have_data(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Checks that no layer is on the meta device.

    Raises:
        ValueError: a layer is on the meta device; the message names the layer.
    """
    for name, layer in layers:
        if any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers())):
            raise ValueError(
                f"{layer_title(name, layer)} is on the meta device; give it data with GPipe's load_weights, "
                "or memory with to_empty(device=...)"
            )


def check_partitions_fit(
    partitions: Iterable[Sequence[tuple[str, nn.Module]]], devices: Sequence[torch.device]
) -> None:
    """Checks that partitions fit on their devices, before any layer is moved.

    Each layer must fit on its device. On a GPU, all its stages together must fit into the total memory, and
    the tensors to be moved there into the free memory. Tensors on the meta device count, since they get
    memory when they are loaded.

    Args:
        partitions: the named layers of each partition.
        devices: the device of each partition.

    Raises:
        ValueError: a check fails; the message names the layer or stages, the device and the needed memory.
    """
    on_gpu: dict[torch.device, list[int]] = {}
    layers: dict[torch.device, list[nn.Module]] = {}
    for index, (partition, device) in enumerate(zip(partitions, devices, strict=True)):
        check_layers_fit(partition, device)
        if device.type == "cuda":
            on_gpu.setdefault(device, []).append(index)
            layers.setdefault(device, []).extend(layer for _, layer in partition)
    for device, stages in on_gpu.items():
        _check_gpu_memory(nn.ModuleList(layers[device]), device, f"stages {', '.join(map(str, stages))}")


def _check_gpu_memory(layers: nn.Module, device: torch.device, stages: str) -> None:
    needed, total = min_training_bytes(layers), device_memory_bytes(device)
    advice = "use more or larger devices, or another balance"
    if needed > total:
        raise ValueError(
            f"{stages} need {_gib(needed)} for parameters, their gradients and buffers alone, and {device} "
            f"has {_gib(total)}; {advice}"
        )
    tensors = (*layers.parameters(), *layers.buffers())
    bytes_to_move = sum(stored_bytes(tensor) for tensor in _initialized(tensors) if tensor.device != device)
    free = _free_bytes(device)
    if bytes_to_move > free:
        raise ValueError(
            f"{stages} move {_gib(bytes_to_move)} of parameters and buffers to {device}, which has "
            f"{_gib(free)} free of {_gib(total)}; {advice}, or free memory there"
        )


def _free_bytes(device: torch.device) -> int:
    """Returns the free memory of a GPU in bytes, including the unused memory of PyTorch's allocator."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + held


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
