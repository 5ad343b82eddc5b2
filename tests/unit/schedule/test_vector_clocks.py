"""Upper bounds on the tensors in flight between stages: never exceeded, and reached by some timing."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from gpipe_fast.schedule import TRANSFERS, Action, Kind, Schedule, fill_drain
from gpipe_fast.schedule.vector_clocks import max_in_flight


def test_training_keeps_received_activations_and_inference_what_waits_or_is_in_use() -> None:
    found = max_in_flight(fill_drain(3, 5, recomputed=[0, 1, 2, 3]))
    assert found == {(0, 1): 5, (1, 2): 5, (1, 0): 5, (2, 1): 5}
    assert max_in_flight(fill_drain(3, 9, slots=4, backward=False)) == {(0, 1): 5, (1, 2): 5}
    assert max_in_flight(fill_drain(2, 3, slots=4, backward=False)) == {(0, 1): 3}
    assert max_in_flight(fill_drain(1, 3)) == {}


def random_run(schedule: Schedule, choose: random.Random) -> dict[tuple[int, int], int]:
    """Runs the actions in a random valid order; returns the most tensors in flight by pair of stages."""
    remaining = [list(actions) for actions in schedule.stages]
    last_use = {(a.stage, a.microbatch): a for row in schedule.stages for a in row if a.kind not in TRANSFERS}
    sent: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    received: defaultdict[tuple[int, int], int] = defaultdict(int)
    in_flight: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    peaks: defaultdict[tuple[int, int], int] = defaultdict(int)
    slowest = choose.randrange(schedule.num_stages)  # runs only if no other stage can

    def edge(action: Action) -> tuple[int, int]:
        offset = 1 if action.kind in (Kind.SEND_F, Kind.RECV_F) else -1
        is_send = action.kind in (Kind.SEND_F, Kind.SEND_B)
        return (action.stage, action.stage + offset) if is_send else (action.stage - offset, action.stage)

    def can_run(action: Action) -> bool:
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            return len(sent[edge(action)]) - received[edge(action)] < schedule.slots
        return action.kind not in TRANSFERS or len(sent[edge(action)]) > received[edge(action)]

    while any(remaining):
        ready = [stage for stage, actions in enumerate(remaining) if actions and can_run(actions[0])]
        action = remaining[choose.choice([s for s in ready if s != slowest] or ready)].pop(0)
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            sent[edge(action)].append(action.microbatch)
            in_flight[edge(action)].add(action.microbatch)
            peaks[edge(action)] = max(peaks[edge(action)], len(in_flight[edge(action)]))
        elif action.kind in TRANSFERS:
            received[edge(action)] += 1
        elif last_use[action.stage, action.microbatch] == action:
            for (_, receiver), microbatches in in_flight.items():
                if receiver == action.stage:
                    microbatches.discard(action.microbatch)
    return dict(peaks)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("slots", [1, 4])
def test_no_timing_exceeds_the_bounds_and_some_timing_reaches_them(slots: int, backward: bool) -> None:
    schedule = fill_drain(3, 6, slots=slots, backward=backward, recomputed=[0, 2] if backward else None)
    bounds = max_in_flight(schedule)
    observed: defaultdict[tuple[int, int], int] = defaultdict(int)
    for seed in range(300):
        for edge, count in random_run(schedule, random.Random(seed)).items():
            observed[edge] = max(observed[edge], count)
    assert dict(observed) == bounds
