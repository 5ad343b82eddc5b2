"""Plans: their schedule, whether they draw random numbers, and the order of transfers between processes."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, _extension
from gpipe_fast.runtime.plan import _extension_actions
from gpipe_fast.runtime.stage import Stage, StageOptions
from gpipe_fast.schedule import SCHEDULES
from tests.internals import plan_of
from tests.untraceable import without_warnings


def pipeline(*layers: nn.Module, chunks: int = 4) -> GPipe:
    return GPipe(nn.Sequential(*layers), [1] * len(layers), chunks=chunks, checkpoint="never")


class Branch(nn.Module):
    """A layer that runs in Python."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 1e9 else -x


@pytest.mark.parametrize(
    ("layer", "draws"),
    [(nn.Dropout(0.5), True), (nn.Dropout(0.0), False), (nn.ReLU(), False), (Branch(), None)],
)
def test_random_operators_are_known_unless_a_layer_runs_in_python(
    layer: nn.Module, draws: bool | None
) -> None:
    with without_warnings():
        assert plan_of(pipeline(nn.Linear(6, 6), layer), torch.randn(8, 6)).draws is draws


def _processes(
    name: str, num_stages: int, size: int, skips: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> list[list[tuple[int, list[tuple[int, int, str, int]]]]]:
    """Returns what each process does in order: an action of a rank, or a transfer that it begins before one.

    Args:
        name: the name of the schedule.
        num_stages: the number of stages.
        size: the number of processes.
        skips: the stages at the ends of skip connections.
        monkeypatch: the fixture.
    """
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(_extension, "Actions", lambda *arguments: made.append(arguments))
    schedule = SCHEDULES[name](num_stages, 4, recomputed=[0, 1, 2])
    for process in range(size):
        stages = [
            SimpleNamespace(
                options=StageOptions(is_remote=stage % size != process, by_nccl=True),
                skips=skips,
                stashes=[i for i, ends in enumerate(skips) if ends[0] == stage],
                pops=[i for i, ends in enumerate(skips) if ends[1] == stage],
            )
            for stage in range(num_stages)
        ]
        _extension_actions(cast("list[Stage]", stages), schedule)
    found = []
    for process, (actions, _, groups, here, receives) in enumerate(made):
        own = [stage for stage in range(num_stages) if stage % size == process]
        assert [*here] == [stage in own for stage in range(num_stages)]
        assert {groups[stage] for stage in own} == {process}  # they take turns
        order: list[tuple[int, list[tuple[int, int, str, int]]]] = [
            (rank, [(sender, receiver, kind, m)]) for rank, kind, sender, receiver, m in receives
        ]
        for stage in own:
            for kind, m, rank in actions[stage]:
                forward = {stage + 1, *(t for s, t in skips if s == stage)}
                backward = {stage - 1, *(s for s, t in skips if t == stage)}
                receivers = {"SEND_F": forward, "SEND_B": backward}.get(kind, set())
                elsewhere = [receiver for receiver in receivers if receiver % size != process]
                elsewhere.sort(key=lambda receiver, own=stage: abs(receiver - own))
                order.append((rank, [(stage, receiver, kind, m) for receiver in elsewhere]))
        found.append(sorted(order, key=lambda each: each[0]))
    return found


@pytest.mark.parametrize(
    ("name", "num_stages", "size"),
    [
        *((name, *numbers) for name in SCHEDULES for numbers in ((4, 2), (6, 3))),
        *((name, number, number) for name in ("gpipe", "1f1b", "zb-h1") for number in (2, 3, 5)),
    ],
)
def test_processes_with_transfers_on_devices_never_wait_for_each_other(
    name: str, num_stages: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process goes on only when the other ends of all transfers that it has begun have begun."""
    skips = [(s, t) for t in range(num_stages) for s in range(t - 1)]
    left = [[each for _, each in steps] for steps in _processes(name, num_stages, size, skips, monkeypatch)]
    begun = [set[tuple[int, int, str, int]]() for _ in range(size)]
    goes_on = True
    while goes_on:
        goes_on = False
        for process in range(size):
            others = set().union(*(each for other, each in enumerate(begun) if other != process))
            if left[process] and begun[process] <= others:
                begun[process].update(left[process].pop(0))
                goes_on = True
    assert left == [[]] * size
    ends = Counter(transfer for each in begun for transfer in each)
    assert set(ends.values()) == {2}
