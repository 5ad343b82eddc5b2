"""Connections: pairs of stages that exchange tensors, their routes, and the bytes in flight."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from gpipe_fast import _extension
from gpipe_fast.runtime.compiled import CompiledStage
from gpipe_fast.runtime.plan import PlannedCall
from gpipe_fast.runtime.stage import TensorSpec
from gpipe_fast.schedule.memory import max_in_flight
from gpipe_fast.skip import skips_of
from gpipe_fast.strides import span
from gpipe_fast.user_warning import warn_user


@dataclass(frozen=True)
class Connection:
    """A pair of stages: the sender sends activations or parameters to the receiver, and receives gradients.

    Attributes:
        sender: index of the sending stage.
        receiver: index of the receiving stage.
        skips: numbers of the skip connections between the two stages; empty for boundaries of neighbours.
        shares: whether the two stages share parameters, and the sender's device has them; then, no ``skips``.
        devices: the devices of sender and receiver.
        route: 'hand-over' within a device, 'peer' by direct copies between GPUs, 'pinned' through pinned host
            memory, 'copy' between the host and a GPU, 'process group' between processes.
        fault: why GPUs do not copy directly although they report peer access; else empty.
    """

    sender: int
    receiver: int
    skips: tuple[int, ...]
    shares: bool
    devices: tuple[torch.device, torch.device]
    route: str
    fault: str = ""

    def __str__(self) -> str:
        ends = (f"stage {i} ({d})" for i, d in zip((self.sender, self.receiver), self.devices, strict=True))
        kind = ", skip connection" if self.skips else ", shared parameters" if self.shares else ""
        return f"{' -> '.join(ends)}{kind}: {self.route}{f' ({self.fault})' if self.fault else ''}"


@dataclass(frozen=True)
class InFlight:
    """The boundary tensors that may be in flight on a connection at the same time, in one direction.

    Attributes:
        slots: the maximum number of micro-batches in flight.
        bytes: the bytes of the largest of these micro-batches.
        tensors: the number of tensors per micro-batch.
    """

    slots: int
    bytes: int
    tensors: int

    def __str__(self) -> str:
        if not self.tensors:
            return "nothing"
        each = f"{self.tensors} tensors, " if self.tensors > 1 else ""
        return f"{self.slots} x {each}{self.bytes:,} bytes"


def connections_of(
    balance: Sequence[int], devices: Sequence[torch.device], layers: Sequence[nn.Module], transport: str
) -> list[Connection]:
    """Returns the connections of neighbours, then those for skip tensors, then those for shared parameters.

    Warns once of each pair of GPUs that should copy directly and cannot.

    Args:
        balance: the number of layers of each stage.
        devices: the device of each stage.
        layers: the layers of the model.
        transport: how tensors are copied between GPUs.

    Raises:
        ValueError: ``transport`` is 'peer', and two devices cannot copy directly.
    """
    connections = []
    for sender, receiver, numbers, shares in _exchanging(balance, devices, layers):
        ends = devices[sender], devices[receiver]
        route, fault = _extension.route(*ends, transport)
        if route == "pinned" and transport == "peer":
            raise ValueError(
                f"transport='peer', but {ends[0]} and {ends[1]} (stages {sender} and {receiver}) have no "
                f"peer access to each other's memory{fault and f' ({fault})'}; use 'auto', which copies "
                "through pinned host memory"
            )
        if fault:
            _warn_of(*sorted(map(str, ends)), fault)
        connections.append(Connection(sender, receiver, numbers, shares, ends, route, fault))
    return connections


def _exchanging(
    balance: Sequence[int], devices: Sequence[torch.device], layers: Sequence[nn.Module]
) -> Iterator[tuple[int, int, tuple[int, ...], bool]]:
    """Yields sender, receiver, skips and shares of each connection."""
    for sender, receiver in pairwise(range(len(balance))):
        yield sender, receiver, (), False
    stage_of = [i for i, size in enumerate(balance) for _ in range(size)]
    skips: dict[tuple[int, int], list[int]] = {}
    for number, skip in enumerate(skips_of(layers)):
        if skip.source >= 0 and stage_of[skip.source] != stage_of[skip.target]:
            skips.setdefault((stage_of[skip.source], stage_of[skip.target]), []).append(number)
    for (sender, receiver), numbers in sorted(skips.items()):
        yield sender, receiver, tuple(numbers), False
    users: dict[int, list[int]] = {}
    for stage, layer in zip(stage_of, layers, strict=True):
        for parameter in layer.parameters():
            users.setdefault(id(parameter), []).append(stage)
    # A parameter is on the device of the last stage that has it.
    shared = {
        (own[-1], stage) for own in users.values() for stage in own if devices[stage] != devices[own[-1]]
    }
    for owner, stage in sorted(shared):
        yield owner, stage, (), True


@functools.cache  # warns once
def _warn_of(one: str, other: str, fault: str) -> None:
    advice = (
        "an IOMMU, PCI access control services (ACS) or a faulty bridge may be the cause; switch the first "
        "two off in the BIOS, because PyTorch's own copies between these GPUs are wrong, too"
        if fault.endswith("arrive changed")
        else "without NVSwitch, a GPU may have only eight peers in all pipelines of a process"
    )
    warn_user(
        f"{one} and {other} report peer access to each other's memory, but {fault}; tensors are copied "
        f"between them through pinned host memory, which is slower; {advice}"
    )


def in_flight(connection: Connection, plan: PlannedCall) -> tuple[InFlight, InFlight] | None:
    """Returns the activations and the gradients in flight on a connection; None if known only at run time."""
    if plan.compiled is None:
        return None
    slots = max_in_flight(plan.schedule)
    forward, backward = [], []
    for stages in plan.compiled:
        specs = _crossing_specs(connection, stages[connection.sender])
        forward.append([_bytes(spec) for spec in specs])
        backward.append([_bytes(spec) for spec in specs if spec.requires_grad])
    found = []
    for direction, each in (
        ((connection.sender, connection.receiver), forward),
        ((connection.receiver, connection.sender), backward),
    ):
        # A skip tensor may be in flight as long as its micro-batch is.
        number = plan.schedule.num_microbatches if connection.skips else slots.get(direction, 0)
        largest = max(each, key=sum)
        found.append(InFlight(number, sum(largest), len(largest) if number else 0))
    return found[0], found[1]


def describe_connections(connections: Sequence[Connection], plan: PlannedCall | None) -> list[str]:
    """Returns a line of text for each connection; with a plan, including the bytes in flight."""
    lines = []
    for connection in connections:
        sizes = None if plan is None or connection.shares else in_flight(connection, plan)
        if plan is not None and sizes is None and not connection.shares:
            lines.append(f"{connection}; sizes are known only at run time")
        elif sizes is None:
            lines.append(str(connection))
        else:
            lines.append(f"{connection}; in flight at most {sizes[0]} forward, {sizes[1]} backward")
    return lines


def _crossing_specs(connection: Connection, sender: CompiledStage) -> Sequence[TensorSpec]:
    """Returns the specs of the boundary tensors that cross a connection for one micro-batch."""
    plain, stashed = sender.outputs.split_skips()
    if not connection.skips:
        return plain.tensors
    each = zip(sender.stage.stashes, stashed, strict=True)
    return [spec for number, spec in each if number in connection.skips and spec is not None]


def _bytes(spec: TensorSpec) -> int:
    """Returns the bytes from the first element to the last, including gaps."""
    return span(spec.shape, spec.strides) * spec.dtype.itemsize
