"""Connections between stages: neighbours and skip connections, and what is in flight on them."""

from __future__ import annotations

import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.layers.skip import Skip
from gpipe_fast.runtime.connections import InFlight, connections_of, describe_connections, in_flight
from tests.internals import plan_of

CPU = torch.device("cpu")


def skip(source: int, target: int) -> Skip:
    return Skip(object(), source, target, 0)  # type: ignore[arg-type]


def test_neighbours_come_first_and_skips_share_a_connection() -> None:
    skips = [skip(0, 5), skip(1, 4), skip(0, 1), skip(2, 3), skip(-1, 5)]
    found = connections_of([2, 2, 2], [CPU] * 3, skips, "auto")
    assert [(each.sender, each.receiver, each.skips) for each in found] == [
        (0, 1, ()),
        (1, 2, ()),
        (0, 2, (0, 1)),
    ]
    assert {each.route for each in found} == {"hand-over"}
    assert str(found[0]) == "stage 0 (cpu) -> stage 1 (cpu): hand-over"
    assert str(found[2]) == "stage 0 (cpu) -> stage 2 (cpu), skip connection: hand-over"


def test_a_single_stage_has_no_connection() -> None:
    assert connections_of([3], [CPU], [], "auto") == []


def test_bytes_in_flight_are_those_of_a_micro_batch() -> None:
    """Stage 0 returns micro-batches of 2 x 8 numbers. All four activations may wait, as in fill-drain."""
    layers = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    pipe = GPipe(layers, [1, 1], chunks=4)
    plan = plan_of(pipe, torch.randn(8, 6))
    (connection,) = connections_of([1, 1], [CPU] * 2, [], "auto")
    assert in_flight(connection, plan) == (InFlight(4, 2 * 8 * 4, 1), InFlight(4, 2 * 8 * 4, 1))
    (line,) = describe_connections([connection], plan)
    assert line == f"{connection}; in flight at most 4 x 64 bytes forward, 4 x 64 bytes backward"
    assert describe_connections([connection], None) == [str(connection)]


def test_what_is_in_flight_in_words() -> None:
    assert str(InFlight(2, 4096, 1)) == "2 x 4,096 bytes"
    assert str(InFlight(3, 64, 2)) == "3 x 2 tensors, 64 bytes"
    assert str(InFlight(0, 0, 0)) == "nothing"
