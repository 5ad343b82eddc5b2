"""Devices of stages: which ones a pipeline may use, and whether two of them are the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

Device = torch.device | int | str


def default_devices() -> list[torch.device] | None:
    """All visible GPUs; None if there are none, and stages run on the CPU."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or None


def listed_devices(devices: Iterable[Device]) -> list[torch.device]:
    """The devices that were passed, as ``torch.device``.

    Raises:
        TypeError: it is one device instead of a list, or a list of something else.
        ValueError: there is no such device.
    """
    if isinstance(devices, (str, int, torch.device)) or not isinstance(devices, Iterable):
        one = repr(str(devices)) if isinstance(devices, (str, torch.device)) else "'cuda:0'"
        raise TypeError(
            f"devices must be a list with a device for each stage, got {devices!r}; for K stages on one "
            f"device pass devices=[{one}] * K"
        )
    return [named_device(device, f"devices[{index}]") for index, device in enumerate(devices)]


def named_device(device: Device, argument: str) -> torch.device:
    """A device from its name or number.

    Args:
        device: as users pass it.
        argument: what errors call it.

    Raises:
        TypeError: it is neither a name, a number nor a device.
        ValueError: there is no such device.
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


def checked_devices(devices: Sequence[torch.device] | None, num_partitions: int) -> list[torch.device]:
    """One device for each partition.

    Raises:
        IndexError: there are fewer.
        ValueError: one is neither a CPU nor a CUDA device, or there is no such GPU.
    """
    if devices is None:
        return [torch.device("cpu")] * num_partitions
    if len(devices) < num_partitions:
        raise IndexError(
            "too few devices to hold given partitions "
            f"(devices: {len(devices)}, partitions: {num_partitions})"
        )
    chosen = [_numbered(device) for device in devices[:num_partitions]]
    others = sorted({str(device) for device in chosen if device.type not in ("cpu", "cuda")})
    if others:
        raise ValueError(
            f"stages run on CPU and CUDA devices, got {', '.join(others)}; pass devices such as ['cuda:0', "
            "'cuda:1'] or ['cpu', 'cpu'], or devices=None for all visible GPUs, or the CPU if there are none"
        )
    visible = torch.cuda.device_count()
    missing = [str(device) for device in chosen if device.type == "cuda" and device.index >= visible]
    if missing:
        raise ValueError(f"there is no {', '.join(missing)}, since {visible} GPUs are visible")
    return chosen


def _numbered(device: torch.device) -> torch.device:
    """With its index, where there are several of a kind."""
    return torch.device(device.type, 0) if device.type == "cuda" and device.index is None else device


def elsewhere(device: torch.device, wanted: torch.device) -> bool:
    """Whether two devices differ; one without an index is the first."""
    return (device.type, device.index or 0) != (wanted.type, wanted.index or 0)
