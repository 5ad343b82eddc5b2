"""Devices of stages: parsing, defaults, checks and comparison."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gpipe_fast.torch_private.modules import parse_to

Device = torch.device | int | str


def default_devices() -> list[torch.device] | None:
    """Returns all visible GPUs, or None if there are none and stages run on the CPU."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or None


def available_processors() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Sets the calling thread's intra-op thread count for a block, because lowering depends on it."""
    before = torch.get_num_threads()
    if number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def kind_of(device: torch.device) -> Hashable:
    """Returns what equal GPUs have in common; another device itself."""
    # A prediction may be for a GPU that the machine has not.
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        return device
    found = torch.cuda.get_device_properties(device)
    return found.name, found.major, found.minor, found.multi_processor_count


def made_current(device: torch.device | None) -> contextlib.AbstractContextManager[object]:
    """Returns a context manager that makes a GPU CUDA's current device, and does nothing for other devices.

    PyTorch asks the current device what it supports, also for fake tensors on another one.
    """
    is_gpu = device is not None and device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.device(device) if is_gpu else contextlib.nullcontext()


def parse_devices(devices: Iterable[Device] | Device) -> list[torch.device]:
    """Returns the user's devices as ``torch.device`` objects.

    Raises:
        TypeError: `devices` is a single device, or an element is not a device.
        ValueError: PyTorch does not know a device name.
    """
    if isinstance(devices, (str, int, torch.device)) or not isinstance(devices, Iterable):
        one = repr(str(devices)) if isinstance(devices, (str, torch.device)) else "'cuda:0'"
        raise TypeError(
            f"devices must be a list with a device for each stage, got {devices!r}; for K stages on one "
            f"device pass devices=[{one}] * K"
        )
    return [parse_device(device, f"devices[{index}]") for index, device in enumerate(devices)]


def parse_device(device: Device, argument: str) -> torch.device:
    """Returns a device from its name or number.

    Args:
        device: a name, an index of a GPU or a ``torch.device``.
        argument: the argument's name in error messages.

    Raises:
        TypeError: `device` is neither a name, a number nor a device.
        ValueError: PyTorch does not know the device's name.
    """
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise TypeError(f"{argument} must be a device such as 'cpu' or 'cuda:0', got {device!r}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{argument} must be a device such as 'cpu' or 'cuda:0', got {device!r}: {reason}"
        ) from None


def absent_gpu(device: Device) -> torch.device:
    """Returns a GPU that the machine need not have.

    Raises:
        TypeError: as for `parse_device`.
        ValueError: as for `parse_device`; or it is no CUDA device.
    """
    found = parse_device(device, "device")
    if found.type != "cuda":
        raise ValueError(
            f"device names a GPU, which this machine need not have, got {str(found)!r}; pass device='cuda', "
            "or leave the argument out for the model's own devices"
        )
    return torch.device("cuda", found.index or 0)


def checked_devices(devices: Sequence[torch.device] | None, num_partitions: int) -> list[torch.device]:
    """Returns one device for each partition; the CPU if `devices` is None.

    Raises:
        IndexError: there are fewer devices than partitions.
        ValueError: a device is neither a CPU nor a CUDA device, or is a GPU that is not visible.
    """
    if devices is None:
        return [torch.device("cpu")] * num_partitions
    if len(devices) < num_partitions:
        raise IndexError(
            "too few devices to hold given partitions "
            f"(devices: {len(devices)}, partitions: {num_partitions}); pass a device for each stage, which "
            f"has one partition of the layers, such as devices=['cpu'] * {num_partitions}, or fewer stages"
        )
    chosen = [_with_index(device) for device in devices[:num_partitions]]
    others = sorted({str(device) for device in chosen if device.type not in ("cpu", "cuda")})
    if others:
        raise ValueError(
            f"stages run on CPU and CUDA devices, got {', '.join(others)}; pass devices such as ['cuda:0', "
            "'cuda:1'] or ['cpu', 'cpu'], or devices=None for all visible GPUs, or the CPU if there are none"
        )
    visible = torch.cuda.device_count()
    missing = [str(device) for device in chosen if device.type == "cuda" and device.index >= visible]
    if missing:
        raise ValueError(
            f"there is no {', '.join(missing)}, since {visible} GPUs are visible; pass devices that PyTorch "
            "sees (torch.cuda.device_count()), and check CUDA_VISIBLE_DEVICES"
        )
    return chosen


def _with_index(device: torch.device) -> torch.device:
    """Returns a CUDA device with an explicit index; other devices unchanged."""
    return torch.device(device.type, 0) if device.type == "cuda" and device.index is None else device


def devices_differ(device: torch.device, wanted: torch.device) -> bool:
    """Returns whether two devices differ. A device without an index is the first of its type."""
    return (device.type, device.index or 0) != (wanted.type, wanted.index or 0)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device, itself if it is there already.

    Between GPUs it is copied through the host. A direct copy by PyTorch makes them peers, of which a GPU may
    have only eight, and nothing checks that it arrives.
    """
    between_gpus = tensor.is_cuda and device.type == "cuda" and devices_differ(tensor.device, device)
    return (tensor.cpu() if between_gpus else tensor).to(device)


def casts_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], own: Iterable[torch.device], instead: str
) -> dict[str, Any]:
    """Returns what ``Module.to(*args, **kwargs)`` casts to, if it moves nothing.

    Args:
        args: positional arguments of ``to``.
        kwargs: its keyword arguments.
        own: the devices of the stages.
        instead: why a pipeline is not moved, and what the user can do, for the error message.

    Raises:
        TypeError: the device asked for is not that of every stage.
    """
    device, dtype, non_blocking, memory_format = parse_to(*args, **kwargs)
    stages = dict.fromkeys(own)
    if device is not None and any(devices_differ(stage, device) for stage in stages):
        raise TypeError(
            f"denied to move parameters and buffers, because {instead}; got '{device}', and the stages are "
            f"on {', '.join(map(str, stages))}"
        )
    casts = {"dtype": dtype, "memory_format": memory_format}
    casts = {name: value for name, value in casts.items() if value is not None}
    return casts | {"non_blocking": non_blocking} if casts else {}


def silence_stream_warning(devices: Iterable[torch.device]) -> None:
    """Turns off PyTorch's warning about the streams of gradients if these devices are several GPUs.

    It warns if a gradient was computed on another stream than its parameter's. That is intended: the
    gradients of all devices come from one autograd node, whose stream is that of the last stage's device.
    """
    graph = torch.autograd.graph
    if len({device for device in devices if device.type == "cuda"}) > 1 and hasattr(
        graph, "set_warn_on_accumulate_grad_stream_mismatch"
    ):  # earlier versions do not warn
        graph.set_warn_on_accumulate_grad_stream_mismatch(False)
