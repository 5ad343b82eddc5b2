"""Clocks: by how much the clock of another process is ahead of the own one, from round trips of messages.

A message takes between no time and the whole round trip to the other process, so its answer was written half
a round trip after the message was sent, give or take the other half (Mills, RFC 5905)::

    own clock      sent ───────── sent + trip / 2 ───────── received
    other clock                      answered
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

_NUM_TRIPS = 32


class Trip(NamedTuple):
    """A round trip, in nanoseconds: the first and last on the own clock, ``answered`` on the other one."""

    sent: int
    answered: int
    received: int


class Offset(NamedTuple):
    """The other clock minus the own one, and the maximum error of that, in nanoseconds."""

    offset: int
    error: int


def offset_of(trips: Sequence[Trip]) -> Offset:
    """Returns the offset by the shortest round trip, whose error is the smallest."""
    sent, answered, received = min(trips, key=lambda trip: trip.received - trip.sent)
    return Offset(answered - (sent + received) // 2, (received - sent + 1) // 2)


def offset_to_first(group: Any, rank: int) -> Offset:
    """Returns the offset of this process to rank 0 of a group, all of whose ranks call this."""
    message = torch.zeros(1, dtype=torch.int64, device="cpu")
    if rank > 0:
        return offset_of([_trip(group, message) for _ in range(_NUM_TRIPS)])
    for other in range(1, group.size()):
        for _ in range(_NUM_TRIPS):
            group.recv([message], other, 0).wait()
            message[0] = time.monotonic_ns()
            group.send([message], other, 0).wait()
    return Offset(0, 0)


def _trip(group: Any, message: torch.Tensor) -> Trip:
    sent = time.monotonic_ns()
    group.send([message], 0, 0).wait()
    group.recv([message], 0, 0).wait()
    received = time.monotonic_ns()
    return Trip(sent, int(message), received)
