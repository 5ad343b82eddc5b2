"""How much may lie between stages: never more than is said, and no less than some timing needs."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from gpipe_fast.schedule import TRANSFERS, Action, Kind, Schedule, fill_drain
from gpipe_fast.schedule.slots import most_at_once


def test_training_keeps_what_arrives_for_the_backward() -> None:
    found = most_at_once(fill_drain(3, 5, recomputed=[0, 1, 2, 3]))
    assert found == {(0, 1): 5, (1, 2): 5, (1, 0): 5, (2, 1): 5}


def test_inference_keeps_what_waits_and_what_is_in_work() -> None:
    assert most_at_once(fill_drain(3, 9, slots=4, backward=False)) == {(0, 1): 5, (1, 2): 5}
    assert most_at_once(fill_drain(2, 3, slots=4, backward=False)) == {(0, 1): 3}


def test_one_stage_sends_nothing() -> None:
    assert most_at_once(fill_drain(1, 3)) == {}


def test_gradients_that_are_used_before_the_next_is_sent() -> None:
    """Here each micro-batch goes back before the next one comes."""
    schedule = Schedule.parse(
        """0F0, 0SEND_F0, 0RECV_B0, 0B0, 0F1, 0SEND_F1, 0RECV_B1, 0B1
        1RECV_F0, 1F0, 1B0, 1SEND_B0, 1RECV_F1, 1F1, 1B1, 1SEND_B1"""
    )
    assert most_at_once(schedule) == {(0, 1): 1, (1, 0): 1}


def run_somehow(schedule: Schedule, choose: random.Random) -> dict[tuple[int, int], int]:
    """Takes actions in an order that the schedule allows; returns how many slots were taken at most."""
    left = [list(actions) for actions in schedule.stages]
    last = {(a.stage, a.microbatch): a for row in schedule.stages for a in row if a.kind not in TRANSFERS}
    sent: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    received: defaultdict[tuple[int, int], int] = defaultdict(int)
    taken: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    most: defaultdict[tuple[int, int], int] = defaultdict(int)
    lazy = choose.randrange(schedule.num_stages)  # goes on only when nobody else can

    def edge(action: Action) -> tuple[int, int]:
        step = 1 if action.kind in (Kind.SEND_F, Kind.RECV_F) else -1
        sends = action.kind in (Kind.SEND_F, Kind.SEND_B)
        return (action.stage, action.stage + step) if sends else (action.stage - step, action.stage)

    def can(action: Action) -> bool:
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            return len(sent[edge(action)]) - received[edge(action)] < schedule.slots
        return action.kind not in TRANSFERS or len(sent[edge(action)]) > received[edge(action)]

    while any(left):
        ready = [stage for stage, actions in enumerate(left) if actions and can(actions[0])]
        action = left[choose.choice([s for s in ready if s != lazy] or ready)].pop(0)
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            sent[edge(action)].append(action.microbatch)
            taken[edge(action)].add(action.microbatch)
            most[edge(action)] = max(most[edge(action)], len(taken[edge(action)]))
        elif action.kind in TRANSFERS:
            received[edge(action)] += 1
        elif last[action.stage, action.microbatch] == action:
            for (_, receiver), microbatches in taken.items():
                if receiver == action.stage:
                    microbatches.discard(action.microbatch)
    return dict(most)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_no_timing_needs_more_and_some_timing_needs_as_many(
    num_stages: int, slots: int, backward: bool
) -> None:
    schedule = fill_drain(
        num_stages, 6, slots=slots, backward=backward, recomputed=[0, 2] if backward else None
    )
    said = most_at_once(schedule)
    seen: defaultdict[tuple[int, int], int] = defaultdict(int)
    for seed in range(300):
        for edge, number in run_somehow(schedule, random.Random(seed)).items():
            seen[edge] = max(seen[edge], number)
    assert dict(seen) == said
