"""Placement: the number of layers of each stage, and its device."""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gpipe_fast import devices as _devices
from gpipe_fast.balance.partition import balance_by_cost
from gpipe_fast.devices import Device, checked_devices
from gpipe_fast.layers.device_memory import check_partitions_fit
from gpipe_fast.runtime.processes import ONE_PROCESS, Processes

_Item = TypeVar("_Item")


class Placement(NamedTuple):
    """Which layers each stage has, and where.

    Attributes:
        balance: the number of layers of each partition.
        devices: the device of each partition.
        choice: the devices to choose from, for another balance; None stands for the CPU.
        is_pending: whether the first call chooses another balance.
    """

    balance: list[int]
    devices: list[torch.device]
    choice: Sequence[torch.device] | None
    is_pending: bool = False

    @classmethod
    def checked(
        cls,
        children: Mapping[str, nn.Module],
        balance: Iterable[int] | None,
        devices: Iterable[Device] | Device | None,
        processes: Processes = ONE_PROCESS,
    ) -> Placement:
        """Returns the checked placement of layers. Moves nothing.

        Args:
            children: the layers, by name, in order.
            balance: the number of layers of each partition; None balances parameter counts.
            devices: at least one for each partition; by default all GPUs, or the CPU. Each of several
                processes has one instead.
            processes: the processes of the stages.

        Raises:
            TypeError: ``balance`` or ``devices`` has a wrong type.
            ValueError: the balance does not fit the layers, or layers are too large for their devices.
            IndexError: there are fewer devices than partitions.
        """
        is_mesh = processes.is_mesh
        if is_mesh:
            balance = None if balance is None else list(balance)
            # The devices of stages in other processes count as equal to ours.
            devices = [processes.device] * len(balance or range(processes.size))
        choice = resolve_devices(devices)
        found = resolve_balance([*children.values()], balance, choice)
        processes.check_balance(found)
        chosen, partitions = checked_devices(choice, len(found)), [*_partitions_of(children.items(), found)]
        own = processes.stages_of(len(found))
        check_partitions_fit([partitions[i] for i in own], [chosen[i] for i in own])
        return cls(found, chosen, choice, balance is None and len(found) > 1 and not is_mesh)

    def partitions(self, children: Mapping[str, nn.Module]) -> list[nn.Sequential]:
        """Returns the layers of each stage, under their names."""
        return [nn.Sequential(OrderedDict(own)) for own in _partitions_of(children.items(), self.balance)]


def resolve_devices(devices: Iterable[Device] | Device | None) -> list[torch.device] | None:
    """Returns the given devices, or by default all GPUs; None stands for the CPU."""
    if devices is None:
        return _devices.default_devices()
    return _devices.parse_devices(devices)


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


def checked_balance(balance: Iterable[int], num_layers: int) -> list[int]:
    """Returns the number of layers of each partition.

    Raises:
        TypeError: `balance` is not a list of numbers.
        ValueError: `balance` does not sum to `num_layers`, or a partition has no layer.
    """
    if isinstance(balance, (str, bytes)) or not isinstance(balance, Iterable):
        raise TypeError(
            f"balance must be a list with the number of layers of each stage, such as [{num_layers}] for "
            f"one stage, got {balance!r}; to choose only the number of stages, leave balance out and pass "
            "devices, such as ['cpu'] * 2 or ['cuda:0', 'cuda:1']"
        )
    sizes = list(balance)
    if not all(isinstance(size, (Real, Tensor)) for size in sizes):
        raise TypeError(
            f"all balance numbers must be positive integer (balance: {sizes}); every stage needs a layer"
        )
    if sum(sizes) != num_layers:
        raise ValueError(
            f"module and sum of balance have different length (module: {num_layers}, "
            f"sum of balance: {sum(sizes)}); balance is the number of layers of each stage, and every module "
            "that is assigned to the model is a layer"
        )
    if any(size <= 0 or size != int(size) for size in sizes):
        raise ValueError(
            f"all balance numbers must be positive integer (balance: {sizes}); every stage needs a layer"
        )
    return [int(size) for size in sizes]


def _partitions_of(items: Iterable[_Item], balance: Iterable[int]) -> Iterator[list[_Item]]:
    """Yields the items of each partition."""
    left = iter(items)
    return (list(itertools.islice(left, size)) for size in balance)
