"""What a stage needs, from the order of its actions and what each of them changes."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from gpipe_fast.schedule import SCHEDULES, TRANSFERS, Action, Kind, Schedule, fill_drain, schedule_for
from gpipe_fast.schedule.memory import Change, keeps, max_in_flight, moments, peak_of, peaks


def walk(cells: str, stage: int = 0, waiting: frozenset[Kind] = frozenset(), holds: bool = False) -> str:
    """Returns the moments: the places of other stages before, and a star until a backward has ended."""
    order = [Action.parse(cell) for cell in cells.split()]
    found = moments(order, stage, waiting, holds)
    return " ".join(f"{place or ''}{kind.value}{m}{'*' * first}" for m, (place, kind, first) in found)


def test_the_drawn_example() -> None:
    order = [Action.parse(cell) for cell in ("0F0", "0F1", "0B0", "0F2", "0B1", "0B2")]
    assert walk(" ".join(map(str, order))) == "F0 F1 R0* B0* F2 R1 B1 R2 B2"
    assert peak_of(moments(order, 0), [keeps(3, 4)] * 3, {}) == {"kept": 10}


def test_a_recompute_that_is_scheduled_is_no_other_one() -> None:
    assert walk("0R0 0RECV_B0 0I0 0W0") == "R0* RECV_B0 I0* W0*"


def test_the_parts_at_the_peak() -> None:
    """What runs needs most while it runs, beside what is there at all times."""
    first = {(0, Kind.F, False): [Change("saved", 5), Change("scratch", 0, 7), Change("saved", -2)]}
    found = peak_of(
        [(0, (0, Kind.F, False)), (1, (0, Kind.F, False))], [first, {}], {"saved": 0, "scratch": 1}
    )
    assert found == {"saved": 5, "scratch": 8}


def test_a_copied_tensor_waits_until_the_next_one_is_sent() -> None:
    cells = "0F0 0SEND_F0 0F1 0SEND_F1"
    assert walk(cells) == "F0 SEND_F0 F1 SEND_F1"
    assert walk(cells, waiting=frozenset({Kind.SEND_F})) == "F0 F1 SEND_F0"


def test_gradients_that_are_sent_between_two_halves_stay_until_the_second() -> None:
    cells = "1I0 1SEND_B0 0B0 1W0 1I1 1SEND_B1 1W1"
    assert walk(cells, 1) == "R0* I0* SEND_B0 -1B0 W0* R1 I1 SEND_B1 W1"
    assert walk(cells, 1, holds=True) == "R0* I0* W0* SEND_B0 -1B0 R1 I1 W1 SEND_B1"


def slow_peak(schedule: Schedule, stage: int, kept: list[tuple[float, float]]) -> float:
    """Returns the most that is kept, counted anew after each action."""
    row = schedule.stages[stage]
    most = 0.0
    for now in range(1, len(row) + 1):
        total = 0.0
        for m, (first, more) in enumerate(kept):
            kinds = [action.kind for action in row[:now] if action.microbatch == m]
            last = [action for action in row if action.microbatch == m and action.kind in (Kind.B, Kind.W)]
            is_over = bool(last) and last[0] in row[: now - 1]
            total += first * (Kind.F in kinds and not is_over)
            total += more * (not is_over and not {Kind.R, Kind.B, Kind.I}.isdisjoint(kinds))
        most = max(most, total)
    return most


@pytest.mark.parametrize("name", SCHEDULES)
def test_peaks_equal_a_slow_count(name: str) -> None:
    draw = random.Random(name)
    for _ in range(10):
        stages, number = draw.randint(1, 4), draw.randint(1, 6)
        schedule = schedule_for(name, stages, number, recomputed=range(draw.randint(0, number)))
        kept = [
            [(float(draw.randint(0, 9)), float(draw.randint(0, 9))) for _ in range(number)]
            for _ in range(schedule.num_stages)
        ]
        assert peaks(schedule, kept) == [slow_peak(schedule, i, own) for i, own in enumerate(kept)]


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
