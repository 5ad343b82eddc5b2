"""Whether a layer fits on a device at all."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import nn


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
        title = f"layer {name!r} ({type(layer).__name__})"
        needed, there = least_bytes(layer), capacity(device)
        if needed > there:
            raise ValueError(
                f"{title} needs {_gib(needed)} for parameters, their gradients and buffers alone, and "
                f"{device} has {_gib(there)}; make it several layers, or give it a larger device"
            )
        if any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers())):
            raise ValueError(f"{title} is on the meta device; give it memory by to_empty(device=...)")


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
