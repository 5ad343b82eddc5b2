"""Whether layers fit on their devices at all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from gpipe_fast.layers.title import title


def capacity(device: torch.device) -> int:
    """Bytes of memory that a device has."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def least_bytes(layer: nn.Module) -> int:
    """What training a layer needs at least: parameters, their gradients, and buffers; no activations."""
    parameters = sum(p.nbytes * (2 if p.requires_grad else 1) for p in _there(layer.parameters()))
    return parameters + sum(buffer.nbytes for buffer in _there(layer.buffers()))


def _there(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    return (tensor for tensor in tensors if not nn.parameter.is_lazy(tensor))


def check_fits(layers: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
    """Refuses layers that are larger than a device, or have no memory yet.

    Raises:
        ValueError: there is one; the message names it.
    """
    for name, layer in layers:
        needed, there = least_bytes(layer), capacity(device)
        if needed > there:
            raise ValueError(
                f"{title(name, layer)} needs {_gib(needed)} for parameters, their gradients and buffers "
                f"alone, and {device} has {_gib(there)}; make it several layers, or give it a larger device"
            )
        if any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers())):
            raise ValueError(
                f"{title(name, layer)} is on the meta device; give it memory by to_empty(device=...)"
            )


def check_all_fit(
    partitions: Iterable[Sequence[tuple[str, nn.Module]]], devices: Sequence[torch.device]
) -> None:
    """Refuses partitions that are larger than their devices, or have no memory yet; nothing is moved before.

    Of a GPU, what all its stages need must be there, and what is to be moved to it must be free.

    Args:
        partitions: the named layers of each.
        devices: of each.

    Raises:
        ValueError: there is one; the message says what is needed, and where.
    """
    on_gpu: dict[torch.device, list[int]] = {}
    layers: dict[torch.device, list[nn.Module]] = {}
    for index, (partition, device) in enumerate(zip(partitions, devices, strict=True)):
        check_fits(partition, device)
        if device.type == "cuda":
            on_gpu.setdefault(device, []).append(index)
            layers.setdefault(device, []).extend(layer for _, layer in partition)
    for device, stages in on_gpu.items():
        _check_gpu(nn.ModuleList(layers[device]), device, f"stages {', '.join(map(str, stages))}")


def _check_gpu(layers: nn.Module, device: torch.device, stages: str) -> None:
    needed, total = least_bytes(layers), capacity(device)
    what_helps = "give them more or larger devices, or another balance"
    if needed > total:
        raise ValueError(
            f"{stages} need {_gib(needed)} for parameters, their gradients and buffers alone, and {device} "
            f"has {_gib(total)}; {what_helps}"
        )
    tensors = (*layers.parameters(), *layers.buffers())
    coming = sum(tensor.nbytes for tensor in _there(tensors) if tensor.device != device)
    free = _free(device)
    if coming > free:
        raise ValueError(
            f"{stages} bring {_gib(coming)} of parameters and buffers to {device}, which has {_gib(free)} "
            f"free of {_gib(total)}; {what_helps}, or free memory there"
        )


def _free(device: torch.device) -> int:
    """Bytes that can be allocated on a GPU, of what PyTorch holds there too."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + held


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
