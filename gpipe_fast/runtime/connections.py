"""Connections: pairs of stages that exchange boundary tensors, their routes, and the bytes in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from gpipe_fast import _extension
from gpipe_fast.layers.skip import Skip
from gpipe_fast.runtime.plan import PlannedCall, StageOutputs
from gpipe_fast.runtime.stage import TensorSpec
from gpipe_fast.schedule.vector_clocks import max_in_flight
from gpipe_fast.strides import span


@dataclass(frozen=True)
class Connection:
    """A pair of stages: the sender sends boundary activations to the receiver, and receives gradients.

    Attributes:
        sender: index of the sending stage.
        receiver: index of the receiving stage.
        skips: numbers of the skip connections between the two stages; empty for boundaries of neighbours.
        devices: the devices of sender and receiver.
        route: 'hand-over' within a device, 'peer' by direct copies between GPUs, 'pinned' through pinned host
            memory, 'copy' between the host and a GPU, 'process group' between processes.
    """

    sender: int
    receiver: int
    skips: tuple[int, ...]
    devices: tuple[torch.device, torch.device]
    route: str

    def __str__(self) -> str:
        ends = (f"stage {i} ({d})" for i, d in zip((self.sender, self.receiver), self.devices, strict=True))
        return f"{' -> '.join(ends)}{', skip connection' if self.skips else ''}: {self.route}"


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
    balance: Sequence[int], devices: Sequence[torch.device], skips: Sequence[Skip], transport: str
) -> list[Connection]:
    """Returns the connections of neighbours, then the connections for skip tensors, sorted by stages.

    Args:
        balance: the number of layers of each stage.
        devices: the device of each stage.
        skips: the skip connections of the model.
        transport: how boundary tensors are copied between GPUs.

    Raises:
        ValueError: ``transport`` is 'peer', and two devices have no peer access.
    """
    stage_of = [i for i, size in enumerate(balance) for _ in range(size)]
    skips_by_pair: dict[tuple[int, int], list[int]] = {}
    for number, skip in enumerate(skips):
        if skip.source < 0:
            continue
        pair = stage_of[skip.source], stage_of[skip.target]
        if pair[0] != pair[1]:
            skips_by_pair.setdefault(pair, []).append(number)
    neighbours = [(pair, ()) for pair in pairwise(range(len(balance)))]
    connections = []
    for (sender, receiver), numbers in (*neighbours, *sorted(skips_by_pair.items())):
        ends = devices[sender], devices[receiver]
        route = _extension.route(*ends, transport)
        if route is None:
            raise ValueError(
                f"transport='peer', but {ends[0]} and {ends[1]} (stages {sender} and {receiver}) have no "
                "peer access to each other's memory; use 'auto', which copies through pinned host memory"
            )
        connections.append(Connection(sender, receiver, tuple(numbers), ends, route))
    return connections


def in_flight(connection: Connection, plan: PlannedCall) -> tuple[InFlight, InFlight] | None:
    """Returns the activations and the gradients in flight on a connection; None if known only at run time."""
    if plan.stage_outputs is None:
        return None
    slots = max_in_flight(plan.schedule)
    forward, backward = [], []
    for stages in plan.stage_outputs:
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
        sizes = None if plan is None else in_flight(connection, plan)
        if plan is not None and sizes is None:
            lines.append(f"{connection}; sizes are known only at run time")
        elif sizes is None:
            lines.append(str(connection))
        else:
            lines.append(f"{connection}; in flight at most {sizes[0]} forward, {sizes[1]} backward")
    return lines


def _crossing_specs(connection: Connection, stage_outputs: StageOutputs) -> list[TensorSpec]:
    """Returns the specs of the boundary tensors that cross a connection for one micro-batch."""
    if not connection.skips:
        return list(stage_outputs.tensors)
    return [spec for number in connection.skips if (spec := stage_outputs.skips[number]) is not None]


def _bytes(spec: TensorSpec) -> int:
    """Returns the bytes from the first element to the last, including gaps."""
    return span(spec.shape, spec.strides) * spec.dtype.itemsize
