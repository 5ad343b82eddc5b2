"""Connections between stages: neighbours and skip connections, and what is in flight on them."""

from __future__ import annotations

import torch

from gpipe_fast.layers.skip import Skip
from gpipe_fast.runtime.connections import connections_of

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
