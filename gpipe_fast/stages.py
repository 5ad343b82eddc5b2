"""Stages from layers: the number of layers and the device of each stage."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import torch
from torch import nn

from gpipe_fast import devices as _devices
from gpipe_fast.arguments import checked_balance
from gpipe_fast.balance.device_memory import check_partitions_fit
from gpipe_fast.balance.partition import balance_by_cost
from gpipe_fast.devices import Device, checked_devices
from gpipe_fast.layers.skip import skips_of
from gpipe_fast.runtime.stage import Stage, StageOptions, Tie
from gpipe_fast.trace.layer_states import LayerStates


def resolve_devices(devices: Iterable[Device] | Device | None) -> list[torch.device] | None:
    """Returns the given devices, or by default all GPUs; None stands for the CPU."""
    if devices is None:
        return _devices.default_devices()
    return _devices.parse_devices(devices)


def checked_placement(
    layers: Sequence[tuple[str, nn.Module]],
    balance: Iterable[int] | None,
    devices: Sequence[torch.device] | None,
    own: slice = slice(None),
) -> tuple[list[int], list[torch.device]]:
    """Returns the checked balance of named layers, and the device of each partition. Moves nothing.

    Args:
        layers: (name, layer) pairs, in order.
        balance: the number of layers of each partition; None balances parameter counts.
        devices: at least one for each partition; None stands for the CPU.
        own: which partitions are in this process.

    Raises:
        ValueError: the balance does not fit the layers, or layers are too large for their devices.
        IndexError: there are fewer devices than partitions.
    """
    found = resolve_balance([layer for _, layer in layers], balance, devices)
    chosen = checked_devices(devices, len(found))
    check_partitions_fit([*partitions_of(layers, found)][own], chosen[own])
    return found, chosen


def resolve_balance(
    layers: Sequence[nn.Module], balance: Iterable[int] | None, devices: Sequence[torch.device] | None = None
) -> list[int]:
    """Returns the user's balance, checked; by default one by parameter count, with a partition per device."""
    if balance is not None:
        return checked_balance(balance, len(layers))
    wanted = len(devices) if devices is not None else os.cpu_count() or 1
    if not layers:
        return []
    costs = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    return balance_by_cost(max(1, min(wanted, len(layers))), costs)


_Layer = TypeVar("_Layer")


def partitions_of(layers: Iterable[_Layer], balance: Iterable[int]) -> Iterator[list[_Layer]]:
    """Yields the layers of each partition."""
    left = iter(layers)
    return (list(islice(left, size)) for size in balance)


def stages_of(
    layers: Sequence[nn.Module],
    balance: Sequence[int],
    devices: Sequence[torch.device],
    deferred: bool,
    grad_dtype: torch.dtype | None,
    fuse: bool,
    is_absent: bool = False,
    own_stages: Collection[int] | None = None,
    ties: Sequence[Tie] = (),
    by_nccl: bool = False,
) -> list[Stage]:
    """Returns a stage for each partition.

    Args:
        layers: all layers of the model.
        balance: the number of layers of each partition.
        devices: the device of each partition.
        deferred: whether running statistics of batch norm are updated once per mini-batch.
        grad_dtype: the dtype in which gradients are accumulated; None for the parameter's own.
        fuse: whether stages on GPUs use fused kernels.
        is_absent: whether the stages are only traced, for devices that the machine need not have.
        own_stages: the stages of this process, if there are others; None if all are here.
        ties: the parameters that stages in different processes share.
        by_nccl: whether tensors travel between processes by NCCL.
    """
    stages: list[Stage] = []
    skips = skips_of(layers)
    states = LayerStates()
    first = 0
    traced_for = () if is_absent else tuple(devices)
    for index, (own, device) in enumerate(zip(partitions_of(layers, balance), devices, strict=True)):
        is_remote = own_stages is not None and index not in own_stages
        options = StageOptions(deferred, grad_dtype, fuse, is_absent, is_remote, ties, by_nccl, traced_for)
        stages.append(Stage(own, first, device, skips=skips, options=options, states=states))
        first += len(own)
    return stages
