"""Edges: which stages send to which, how what they send gets there, and how much of it lies there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from gpipe_fast import _extension
from gpipe_fast.layers.skip import Skip
from gpipe_fast.runtime.plan import Handed, Plan
from gpipe_fast.runtime.stage import Spec
from gpipe_fast.schedule.slots import most_at_once
from gpipe_fast.strides import span


@dataclass(frozen=True)
class Edge:
    """Two stages of which the first sends activations to the second, and gets gradients back.

    Attributes:
        sender: index of the first.
        receiver: of the second.
        skips: numbers of the skip connections that go straight there; empty for what neighbours hand on.
        devices: of both.
        route: 'hand-over' on one device, 'peer' from the one's memory to the other's, 'pinned' through pinned
            memory of the host, 'copy' between the host and a GPU.
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
class Lying:
    """What may lie at the receiving end of an edge at once, in one direction.

    Attributes:
        slots: of how many micro-batches, at most.
        bytes: of the largest of them.
        tensors: how many it has.
    """

    slots: int
    bytes: int
    tensors: int

    def __str__(self) -> str:
        if not self.tensors:
            return "nothing"
        each = f"{self.tensors} tensors, " if self.tensors > 1 else ""
        return f"{self.slots} x {each}{self.bytes:,} bytes"


def edges_of(
    balance: Sequence[int], devices: Sequence[torch.device], skips: Sequence[Skip], transport: str
) -> list[Edge]:
    """Neighbours first, then skip connections by where they go.

    Args:
        balance: layers of each stage.
        devices: of each stage.
        skips: of the layers.
        transport: how boundary tensors go between GPUs.

    Raises:
        ValueError: ``transport`` is 'peer', and two devices do not reach each other.
    """
    stage_of = [i for i, size in enumerate(balance) for _ in range(size)]
    straight: dict[tuple[int, int], list[int]] = {}
    for number, skip in enumerate(skips):
        pair = stage_of[skip.source], stage_of[skip.target]
        if pair[0] != pair[1]:
            straight.setdefault(pair, []).append(number)
    neighbours = [(pair, ()) for pair in pairwise(range(len(balance)))]
    edges = []
    for (sender, receiver), numbers in (*neighbours, *sorted(straight.items())):
        ends = devices[sender], devices[receiver]
        route = _extension.route(*ends, transport)
        if route is None:
            raise ValueError(
                f"transport='peer', but {ends[0]} and {ends[1]}, of stages {sender} and {receiver}, do not "
                "reach each other's memory; 'auto' goes through memory of the host there"
            )
        edges.append(Edge(sender, receiver, tuple(numbers), ends, route))
    return edges


def lying(edge: Edge, plan: Plan) -> tuple[Lying, Lying] | None:
    """What may lie at an edge's ends, of activations and of gradients; None if that shows only as it runs."""
    if plan.handed is None:
        return None
    slots = most_at_once(plan.schedule)
    forward, backward = [], []
    for stages in plan.handed:
        specs = _crossing(edge, stages[edge.sender])
        forward.append([_bytes(spec) for spec in specs])
        backward.append([_bytes(spec) for spec in specs if spec.requires_grad])
    found = []
    for way, each in (((edge.sender, edge.receiver), forward), ((edge.receiver, edge.sender), backward)):
        # What skips stages may lie there as long as its micro-batch is under way.
        number = plan.schedule.num_microbatches if edge.skips else slots.get(way, 0)
        largest = max(each, key=sum)
        found.append(Lying(number, sum(largest), len(largest) if number else 0))
    return found[0], found[1]


def described(edges: Sequence[Edge], plan: Plan | None) -> list[str]:
    """A line for each edge; with a plan, what lies there."""
    lines = []
    for edge in edges:
        sizes = None if plan is None else lying(edge, plan)
        if plan is not None and sizes is None:
            lines.append(f"{edge}; sizes show only as it runs")
        elif sizes is None:
            lines.append(str(edge))
        else:
            lines.append(f"{edge}; at most {sizes[0]} there, {sizes[1]} back")
    return lines


def _crossing(edge: Edge, handed: Handed) -> list[Spec]:
    if not edge.skips:
        return list(handed.tensors)
    return [spec for number in edge.skips if (spec := handed.skips[number]) is not None]


def _bytes(spec: Spec) -> int:
    """From the first element to the last."""
    return span(spec.shape, spec.strides) * spec.dtype.itemsize
