"""Schedules: literal examples, refused ones, and random ones against a simulation of the rules."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest

from gpipe_fast.schedule import Action, Kind, Schedule, fill_drain

Rows = Sequence[Sequence[Action]]
TRANSFERS = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
SENDER = {Kind.RECV_F: (Kind.SEND_F, -1), Kind.RECV_B: (Kind.SEND_B, 1)}


@dataclass
class Simulation:
    """A pipeline that decides step by step which actions can run: each rule once, nothing precomputed."""

    num_stages: int
    num_microbatches: int
    slots: int
    done: defaultdict[tuple[int, int], set[Kind]] = field(default_factory=lambda: defaultdict(set))
    in_flight: defaultdict[tuple[int, Kind], list[int]] = field(default_factory=lambda: defaultdict(list))

    def can_run(self, action: Action) -> bool:
        stage, kind, m = action.stage, action.kind, action.microbatch
        done_kinds = self.done[stage, m]
        first, last = stage == 0, stage == self.num_stages - 1
        if kind in done_kinds:
            return False
        if kind in SENDER:
            send, offset = SENDER[kind]
            return self.in_flight[stage + offset, send][:1] == [m]
        has_slot = len(self.in_flight[stage, kind]) < self.slots
        in_backward = not done_kinds.isdisjoint({Kind.RECV_B, Kind.B, Kind.I})
        ready = Kind.F in done_kinds and (last or Kind.RECV_B in done_kinds)
        return {
            Kind.F: first or Kind.RECV_F in done_kinds,
            Kind.SEND_F: not last and Kind.F in done_kinds and has_slot,
            Kind.R: (Kind.F if last else Kind.SEND_F) in done_kinds and not in_backward,
            Kind.B: ready and Kind.I not in done_kinds,
            Kind.I: ready and Kind.B not in done_kinds,
            Kind.SEND_B: not first and not done_kinds.isdisjoint({Kind.B, Kind.I}) and has_slot,
            Kind.W: Kind.I in done_kinds and (first or Kind.SEND_B in done_kinds),
            Kind.U: False,
        }[kind]

    def run(self, action: Action) -> None:
        self.done[action.stage, action.microbatch].add(action.kind)
        if action.kind in SENDER:
            send, offset = SENDER[action.kind]
            self.in_flight[action.stage + offset, send].pop(0)
        elif action.kind in TRANSFERS:
            self.in_flight[action.stage, action.kind].append(action.microbatch)

    def finishes(self, rows: Rows) -> bool:
        """Returns whether every stage can run all actions of its row."""
        remaining = [list(row) for row in rows]
        progressed = True
        while progressed:
            progressed = False
            for stage, row in enumerate(remaining):
                if row and row[0].stage == stage and self.can_run(row[0]):
                    self.run(row.pop(0))
                    progressed = True
        return not any(remaining)


def random_schedule(generator: random.Random, minimum: int = 1) -> tuple[Schedule, list[Action]]:
    """Returns a schedule that is valid by construction, and an order in which the simulation ran it."""
    simulation = Simulation(*(generator.randrange(minimum, 5) for _ in range(3)))
    size = (range(simulation.num_stages), Kind, range(simulation.num_microbatches))
    all_actions = [Action(stage, kind, m) for stage in size[0] for kind in size[1] for m in size[2]]
    ran: list[Action] = []
    while ready := [action for action in all_actions if simulation.can_run(action)]:
        ran.append(generator.choice(ready))
        simulation.run(ran[-1])
    rows = tuple(tuple(a for a in ran if a.stage == stage) for stage in size[0])
    return Schedule(rows, simulation.num_microbatches, simulation.slots), ran


def random_seconds(generator: random.Random, schedule: Schedule) -> dict[Action, float]:
    return {action: float(generator.choice([0, 1, 2, 3, 7])) for action in schedule.order()}


def refusal(rows: Rows, num_microbatches: int, slots: int) -> str | None:
    """Returns the error message for such a schedule, or None if it is valid."""
    try:
        Schedule(tuple(map(tuple, rows)), num_microbatches, slots)
    except ValueError as error:
        return str(error)
    return None


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> Schedule:
    """Returns 1F1B: a stage delays its backwards by as many micro-batches as stages follow it."""

    def position(action: Action) -> float:
        delay = num_stages - action.stage - 0.5
        return action.microbatch + delay * (action.kind in (Kind.RECV_B, Kind.B, Kind.SEND_B))

    rows = tuple(tuple(sorted(row, key=position)) for row in fill_drain(num_stages, num_microbatches).stages)
    return Schedule(rows, num_microbatches, num_microbatches)


def compute_actions(actions: Sequence[Action]) -> list[str]:
    return [str(action) for action in actions if action.kind not in TRANSFERS]


def constraints(schedule: Schedule) -> Iterator[tuple[Action, Action]]:
    """Yields pairs of an action and one that must wait for it, as the engine enforces them."""
    for row in schedule.stages:
        yield from pairwise(row)
        for kind, (send, offset) in SENDER.items():
            receives = [action for action in row if action.kind is kind]
            sends = [Action(a.stage + offset, send, a.microbatch) for a in receives]
            yield from zip(sends, receives, strict=True)
            yield from zip(receives, sends[schedule.slots :], strict=False)


def test_timelines_align_names_of_unequal_width() -> None:
    rows = str(fill_drain(11, 2, backward=False)).splitlines()
    assert rows[0] == "stage 0   0F0  0F1"
    assert rows[10] == "stage 10 " + "  .  " * 10 + " 10F0 10F1"


def test_order_keeps_transfers_next_to_their_computations() -> None:
    assert [str(action) for action in fill_drain(2, 2).order()] == [
        *("0F0", "0SEND_F0", "0F1", "0SEND_F1", "1RECV_F0", "1F0", "1RECV_F1", "1F1"),
        *("1B1", "1SEND_B1", "1B0", "1SEND_B0", "0RECV_B1", "0B1", "0RECV_B0", "0B0"),
    ]


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize(("n", "m"), [(1, 3), (2, 1), (2, 5), (3, 2), (3, 4), (4, 4), (5, 2)])
def test_order_of_computations_equals_torchgpipes_clock(n: int, m: int, slots: int) -> None:
    clock = [(i, k - i) for k in range(n + m - 1) for i in range(max(1 + k - m, 0), min(1 + k, n))]
    forwards, backwards = [f"{i}F{j}" for i, j in clock], [f"{i}B{j}" for i, j in reversed(clock)]
    assert compute_actions(fill_drain(n, m, slots=slots).order()) == forwards + backwards


@pytest.mark.parametrize("seed", range(20))
def test_orders_around_a_stage_are_the_two_ends_of_all_orders(seed: int) -> None:
    schedule, ran = random_schedule(random.Random(seed))
    edges = list(constraints(schedule))
    for stage in range(schedule.num_stages):
        late = schedule.order_around(stage, lambda action: False)
        early = schedule.order_around(stage, lambda action: True)
        mixed = schedule.order_around(stage, lambda action: action.stage == 0)
        for order in (late, early, mixed):
            assert sorted(map(str, order)) == sorted(map(str, ran))
            rank = {action: i for i, action in enumerate(order)}
            assert all(rank[before] < rank[after] for before, after in edges)
        for own in schedule.stages[stage]:
            before, after = {own}, {own}
            while more := {a for a, b in edges if b in before} - before:
                before |= more
            while more := {b for a, b in edges if a in after} - after:
                after |= more
            if own == schedule.stages[stage][-1]:
                assert set(late[: late.index(own) + 1]) == before
            assert set(early[early.index(own) :]) >= after
            first = schedule.stages[stage][0]
            assert own != first or set(early[early.index(own) :]) == after
            assert {a for a in mixed[mixed.index(own) :] if a.stage == 0} <= after


@pytest.mark.parametrize("seed", range(20))
def test_order_of_random_schedules_respects_all_constraints(seed: int) -> None:
    schedule, ran = random_schedule(random.Random(seed))
    assert sorted(map(str, schedule.order())) == sorted(map(str, ran))
    rank = {action: i for i, action in enumerate(schedule.order())}
    assert all(rank[before] < rank[after] for before, after in constraints(schedule))
    assert Schedule.parse(schedule.csv(), slots=schedule.slots) == schedule


@pytest.mark.parametrize("seed", range(20))
def test_any_single_mutation_of_a_schedule_is_refused(seed: int) -> None:
    generator = random.Random(seed)
    schedule, _ = random_schedule(generator, minimum=2)  # a single stage is valid without its only backward
    row = generator.choice(schedule.stages)
    action = generator.choice(row)
    i, j = generator.sample([i for i, a in enumerate(row) if a.microbatch == action.microbatch], 2)
    mutants = {
        "dropped": [a for a in row if a != action],
        "duplicated": [*row, action],
        "swapped": [row[{i: j, j: i}.get(k, k)] for k in range(len(row))],
        "moved to the next stage": [a._replace(stage=a.stage + 1) if a == action else a for a in row],
        "given an unknown micro-batch": [a._replace(microbatch=9) if a == action else a for a in row],
    }
    if action.kind is Kind.R:  # a backward is valid without a recompute
        del mutants["dropped"]
    for mutation, mutant in mutants.items():
        rows = [mutant if stage is row else stage for stage in schedule.stages]
        assert refusal(rows, schedule.num_microbatches, schedule.slots), f"{action} {mutation}"


def test_schedules_are_refused_exactly_if_they_cannot_run() -> None:
    """Swaps two actions of a stage and draws a number of slots."""
    generator = random.Random(0)
    completes = []
    for _ in range(300):
        schedule, _ = random_schedule(generator)
        rows = [list(row) for row in schedule.stages]
        row = generator.choice(rows)
        i = generator.randrange(len(row) - 1)
        j = min(i + generator.choice([1, 1, 2, 3]), len(row) - 1)
        row[i], row[j] = row[j], row[i]
        slots = generator.randrange(1, 4)
        completes.append(Simulation(len(rows), schedule.num_microbatches, slots).finishes(rows))
        message = refusal(rows, schedule.num_microbatches, slots)
        assert (message is None) == completes[-1], (rows, slots, message)
    assert 50 < sum(completes) < 250


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0SEND_F0\n1F0", "stage 1 does 1F0, where it has to do 1RECV_F0 1F0"),
        ("0F0,0SEND_F0\n1RECV_F0", "stage 1 does 1RECV_F0, where it has to do 1RECV_F0 1F0"),
        ("0F0,0F0", "stage 0 does 0F0 0F0, where it has to do 0F0"),
        ("0B0,0F0", "stage 0 does 0B0 0F0, where it has to do 0F0 0B0"),
        ("0F0,0F1,0B1", "stage 0 does 0F0, where it has to do 0F0 0B0"),
        ("0F0,0I0", "stage 0 does 0F0 0I0, where it has to do 0F0 0I0 0W0"),
        ("0F0,0W0,0I0", "stage 0 does 0F0 0W0 0I0, where it has to do 0F0 0I0 0W0"),
        ("0F0,0B0,0R0", "stage 0 does 0F0 0B0 0R0, where it has to do 0F0 0R0 0B0"),
        ("0F0,0R0", "stage 0 does 0F0 0R0, where it has to do 0F0 0R0 0B0"),
        ("0F0,1F1", "stage 0 does 0F0, where it has to do 0F0 0SEND_F0"),
        ("0F0,0SEND_F0,1RECV_F0\n1F0", "stage 1 runs on two ranks"),
        ("0F1", "stage 0 does nothing, where it has to do 0F0"),
        ("0F0,0SEND_F0", "stage 0 does 0F0 0SEND_F0, where it has to do 0F0"),
        ("0RECV_F0,0F0", "stage 0 does 0RECV_F0 0F0, where it has to do 0F0"),
        (
            "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1F1,1RECV_F0,1F0",
            "1RECV_F1 would receive from 0SEND_F0, but a connection keeps",
        ),
        (
            "0RECV_B1,0B1,0RECV_B0,0B0\n1B0,1SEND_B0,1B1,1SEND_B1",
            "0RECV_B1 would receive from 1SEND_B0, but a connection keeps",
        ),
        ("0F0,F1", "'F1' is not an action; expected a form like 2F0"),
        ("0F0,0F-1", "'0F-1' is not an action"),
        ("0F0,0F1 0B1", "'0F1 0B1' is not an action"),
        ("", "num_stages must be at least 1, got 0"),
    ],
)
def test_errors_of_invalid_schedules_name_the_cause(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Schedule.parse(text)


def test_numbers_below_one_are_refused() -> None:
    for name, make in {
        "num_stages": lambda: fill_drain(0, 2),
        "num_microbatches": lambda: fill_drain(2, 0),
        "slots": lambda: fill_drain(2, 2, slots=0),
    }.items():
        with pytest.raises(ValueError, match=f"^{name} must be at least 1, got 0$"):
            make()
    with pytest.raises(ValueError, match=r"^0F2 belongs to none of the 2 micro-batches\n"):
        Schedule((tuple(map(Action.parse, ("0F0", "0F1", "0F2"))),), 2, 2)


def test_csv_with_blanks_is_parsed() -> None:
    schedule = Schedule.parse("\n 0F0, 0SEND_F0,,\n , 1RECV_F0, 1F0\n\n")
    assert schedule == fill_drain(2, 1, backward=False)
    assert hash(schedule) == hash(fill_drain(2, 1, backward=False))
    assert schedule != fill_drain(2, 1, backward=False, slots=2)


def test_a_deadlock_with_too_few_slots_is_refused() -> None:
    eager, steady = fill_drain(2, 4).stages[0], one_forward_one_backward(2, 4).stages
    forwards = tuple(a for a in eager if a.kind in (Kind.F, Kind.SEND_F))
    backwards = tuple(a for a in steady[0] if a.kind in (Kind.RECV_B, Kind.B))
    rows = (forwards + backwards, steady[1])
    assert Schedule(rows, 4, 2).num_stages == 2
    deadlock = "^deadlock with 1 slots: 0SEND_F3 waits for 1RECV_F2, 1SEND_B1 waits for 0RECV_B0\n"
    with pytest.raises(ValueError, match=deadlock):
        Schedule(rows, 4, 1)


def test_a_deadlock_with_any_number_of_slots_is_refused() -> None:
    hasty = "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1"
    patient = "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1"
    deadlock = (
        "^deadlock with 9 slots: 0RECV_B0 waits for 1SEND_B0, 1RECV_F1 waits for 0SEND_F1\n"
        "rank 0  0F0 0SEND_F0 >0RECV_B0< 0B0 0F1 0SEND_F1 0RECV_B1 0B1\n"
        "rank 1  1RECV_F0 1F0 >1RECV_F1< 1F1 1B0 1SEND_B0 1B1 1SEND_B1$"
    )
    with pytest.raises(ValueError, match=deadlock):
        Schedule.parse(f"{hasty}\n{patient}", slots=9)


def test_one_forward_one_backward_cannot_be_split() -> None:
    schedule = one_forward_one_backward(2, 3)
    assert str(schedule) == "stage 0  0F0 0F1  .  0B0 0F2 0B1  .  0B2\nstage 1   .  1F0 1B0 1F1 1B1 1F2 1B2"
    # Within a tick, forwards come before backwards.
    ticks = ["0F0", "0F1 1F0", "1B0", "1F1 0B0", "0F2 1B1", "1F2 0B1", "1B2", "0B2"]
    assert " ".join(compute_actions(schedule.order())) == " ".join(ticks)
    for part in (schedule.forward_part, schedule.backward_part):
        with pytest.raises(ValueError, match=r"^0F2 comes after 0B0, so the loss cannot come in between$"):
            part()


def test_times_of_actions_with_unequal_durations() -> None:
    longer = {"0F0": 2, "1RECV_F0": 2, "1F0": 5, "1RECV_F1": 2, "1F1": 4}

    def times(schedule: Schedule) -> list[list[float]]:
        ends = schedule.times(lambda action: longer.get(str(action), 1))
        return [[ends[action] for action in row] for row in schedule.stages]

    schedule = fill_drain(2, 2, backward=False)
    assert times(schedule) == [[2, 3, 4, 5], [5, 10, 12, 16]]
    assert schedule.critical_path(lambda action: longer.get(str(action), 1)) == 16
    # 0SEND_F1 waits from 4 to 5, until 1RECV_F0 frees the only slot.
    assert times(replace(schedule, slots=1)) == [[2, 3, 4, 6], [5, 10, 12, 16]]


@pytest.mark.parametrize("seed", range(20))
def test_actions_begin_when_their_last_dependency_ends(seed: int) -> None:
    generator = random.Random(seed)
    schedule, _ = random_schedule(generator)
    seconds = random_seconds(generator, schedule)
    ends = schedule.times(seconds.__getitem__)
    begins = dict.fromkeys(seconds, 0.0)
    for before, after in constraints(schedule):
        begins[after] = max(begins[after], ends[before])
    assert ends == {action: begins[action] + seconds[action] for action in seconds}
    assert schedule.critical_path(seconds.__getitem__) == max(ends.values())


@pytest.mark.parametrize(("slow", "slots"), [(1, 1), (3, 2), (10, 3)])
def test_a_slow_stage_needs_more_slots(slow: int, slots: int) -> None:
    """Stage 0 sends at 1, 2, 3, 4; stage 1 receives at 1, 1 + slow, ..."""
    schedule = fill_drain(2, 4, backward=False, slots=1)
    assert schedule.slots_needed(lambda a: (1, slow)[a.stage] if a.kind is Kind.F else 0) == slots
    assert schedule.slots_needed() == 1


def test_slots_needed_are_sufficient_and_minimal() -> None:
    generator = random.Random(0)
    needed = []
    for _ in range(100):
        schedule, _ = random_schedule(generator)
        seconds = random_seconds(generator, schedule).__getitem__
        needed.append(schedule.slots_needed(seconds))
        unlimited = replace(schedule, slots=schedule.num_microbatches).times(seconds)
        assert replace(schedule, slots=needed[-1]).times(seconds) == unlimited
        fewer = needed[-1] - 1
        if fewer and not refusal(schedule.stages, schedule.num_microbatches, fewer):
            assert replace(schedule, slots=fewer).times(seconds) != unlimited
    assert {1, 2, 3} <= set(needed)


def lines_run(function: Callable[[], object]) -> int:
    """Returns how many lines of Python a call runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_the_work_for_a_schedule_grows_with_its_actions() -> None:
    """A quadratic algorithm would run 16 times the lines for 4 times the actions."""
    assert len(fill_drain(8, 128).order()) == 128 * (6 * 8 - 4)
    few, many = (lines_run(lambda m=m: fill_drain(8, m).order()) for m in (16, 64))
    assert many < 4.5 * few
