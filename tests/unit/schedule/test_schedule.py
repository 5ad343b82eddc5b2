"""Schedules: literal ones, what is refused, and random ones against a simulation of the rules."""

from __future__ import annotations

import importlib
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from gpipe_fast.schedule import Action, Kind, Schedule, bubble, fill_drain

Rows = Sequence[Sequence[Action]]
TRANSFERS = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
SENDER = {Kind.RECV_F: (Kind.SEND_F, -1), Kind.RECV_B: (Kind.SEND_B, 1)}


@dataclass
class Simulation:
    """A pipeline that is asked what it can do next: each rule once, nothing precomputed."""

    num_stages: int
    num_microbatches: int
    slots: int
    done: defaultdict[tuple[int, int], set[Kind]] = field(default_factory=lambda: defaultdict(set))
    waiting: defaultdict[tuple[int, Kind], list[int]] = field(default_factory=lambda: defaultdict(list))

    def can(self, action: Action) -> bool:
        stage, kind, m = action.stage, action.kind, action.microbatch
        did = self.done[stage, m]
        first, last = stage == 0, stage == self.num_stages - 1
        if kind in did:
            return False
        if kind in SENDER:
            send, step = SENDER[kind]
            return self.waiting[stage + step, send][:1] == [m]
        room = len(self.waiting[stage, kind]) < self.slots
        begun = not did.isdisjoint({Kind.RECV_B, Kind.B, Kind.I})
        ready = Kind.F in did and (last or Kind.RECV_B in did)
        return {
            Kind.F: first or Kind.RECV_F in did,
            Kind.SEND_F: not last and Kind.F in did and room,
            Kind.R: (Kind.F if last else Kind.SEND_F) in did and not begun,
            Kind.B: ready and Kind.I not in did,
            Kind.I: ready and Kind.B not in did,
            Kind.SEND_B: not first and not did.isdisjoint({Kind.B, Kind.I}) and room,
            Kind.W: Kind.I in did and (first or Kind.SEND_B in did),
        }[kind]

    def do(self, action: Action) -> None:
        self.done[action.stage, action.microbatch].add(action.kind)
        if action.kind in SENDER:
            send, step = SENDER[action.kind]
            self.waiting[action.stage + step, send].pop(0)
        elif action.kind in TRANSFERS:
            self.waiting[action.stage, action.kind].append(action.microbatch)

    def finishes(self, rows: Rows) -> bool:
        """Whether every stage gets through its row."""
        left = [list(row) for row in rows]
        moved = True
        while moved:
            moved = False
            for stage, row in enumerate(left):
                if row and row[0].stage == stage and self.can(row[0]):
                    self.do(row.pop(0))
                    moved = True
        return not any(left)


def random_schedule(generator: random.Random, least: int = 1) -> tuple[Schedule, list[Action]]:
    """One that is valid by construction, and an order in which it was seen to run."""
    simulation = Simulation(*(generator.randrange(least, 5) for _ in range(3)))
    size = (range(simulation.num_stages), Kind, range(simulation.num_microbatches))
    every = [Action(stage, kind, m) for stage in size[0] for kind in size[1] for m in size[2]]
    ran: list[Action] = []
    while ready := [action for action in every if simulation.can(action)]:
        ran.append(generator.choice(ready))
        simulation.do(ran[-1])
    rows = tuple(tuple(a for a in ran if a.stage == stage) for stage in size[0])
    return Schedule(rows, simulation.num_microbatches, simulation.slots), ran


def random_seconds(generator: random.Random, schedule: Schedule) -> dict[Action, float]:
    return {action: float(generator.choice([0, 1, 2, 3, 7])) for action in schedule.order()}


def refused(rows: Rows, num_microbatches: int, slots: int) -> str | None:
    """Why, or None."""
    try:
        Schedule(tuple(map(tuple, rows)), num_microbatches, slots)
    except ValueError as error:
        return str(error)
    return None


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> Schedule:
    """A stage begins its backwards as many micro-batches late as stages follow it."""

    def turn(action: Action) -> float:
        late = num_stages - action.stage - 0.5
        return action.microbatch + late * (action.kind in (Kind.RECV_B, Kind.B, Kind.SEND_B))

    rows = tuple(tuple(sorted(row, key=turn)) for row in fill_drain(num_stages, num_microbatches).stages)
    return Schedule(rows, num_microbatches, num_microbatches)


def computing(actions: Sequence[Action]) -> list[str]:
    return [str(action) for action in actions if action.kind not in TRANSFERS]


def constraints(schedule: Schedule) -> Iterator[tuple[Action, Action]]:
    """Pairs of an action and one that must wait for it: as the engine asks for them."""
    for row in schedule.stages:
        yield from pairwise(row)
        for kind, (send, step) in SENDER.items():
            receives = [action for action in row if action.kind is kind]
            sends = [Action(a.stage + step, send, a.microbatch) for a in receives]
            yield from zip(sends, receives, strict=True)
            yield from zip(receives, sends[schedule.slots :], strict=False)


def test_draws_fill_drain() -> None:
    assert str(fill_drain(3, 4)).splitlines() == [
        "stage 0  0F0 0F1 0F2 0F3  .   .   .   .  0B3 0B2 0B1 0B0",
        "stage 1   .  1F0 1F1 1F2 1F3  .   .  1B3 1B2 1B1 1B0",
        "stage 2   .   .  2F0 2F1 2F2 2F3 2B3 2B2 2B1 2B0",
    ]
    documented = str(importlib.import_module("gpipe_fast.schedule.fill_drain").__doc__)
    assert all(line in documented for line in str(fill_drain(3, 4)).splitlines())


def test_draws_names_of_unequal_width() -> None:
    rows = str(fill_drain(11, 2, backward=False)).splitlines()
    assert rows[0] == "stage 0   0F0  0F1"
    assert rows[10] == "stage 10 " + "  .  " * 10 + " 10F0 10F1"


def test_lists_of_fill_drain() -> None:
    schedule = fill_drain(2, 2)
    assert schedule.csv().splitlines() == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0B1,0RECV_B0,0B0",
        "1RECV_F0,1F0,1RECV_F1,1F1,1B1,1SEND_B1,1B0,1SEND_B0",
    ]
    assert (schedule.num_stages, schedule.num_microbatches, schedule.slots) == (2, 2, 2)
    assert fill_drain(2, 2, slots=1).slots == 1
    assert fill_drain(1, 2).csv() == "0F0,0F1,0B1,0B0"
    assert fill_drain(3, 1, backward=False).csv() == "0F0,0SEND_F0\n1RECV_F0,1F0,1SEND_F0\n2RECV_F0,2F0"


def test_lists_of_backwards_in_parts() -> None:
    """Micro-batch 1 does not recompute; stage 0 sends nothing, so its backwards need not be split."""
    schedule = fill_drain(2, 2, recomputed=[0])
    assert schedule.csv().splitlines() == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0B1,0R0,0RECV_B0,0B0",
        "1RECV_F0,1F0,1RECV_F1,1F1,1I1,1SEND_B1,1W1,1R0,1I0,1SEND_B0,1W0",
    ]
    assert Schedule.parse(schedule.csv()) == schedule
    assert (
        schedule.backward_part().csv()
        == "0RECV_B1,0B1,0R0,0RECV_B0,0B0\n1I1,1SEND_B1,1W1,1R0,1I0,1SEND_B0,1W0"
    )
    assert fill_drain(1, 2, recomputed=[0]).csv() == "0F0,0F1,0B1,0R0,0B0"
    assert str(schedule).splitlines() == [
        "stage 0  0F0 0F1  .   .  0B1 0R0  .  0B0",
        "stage 1   .  1F0 1F1 1I1 1W1 1R0 1I0 1W0",
    ]


@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 1), (2, 8), (3, 4), (4, 32), (8, 8)])
def test_backwards_in_parts_wait_less(k: int, m: int) -> None:
    ticks = {Kind.F: 1, Kind.R: 1, Kind.I: 1, Kind.W: 1, Kind.B: 2}
    parts, whole = fill_drain(k, m, recomputed=range(m)).backward_part(), fill_drain(k, m).backward_part()
    assert parts.critical_path(lambda a: ticks.get(a.kind, 0)) == 3 * m + k - 1
    assert whole.critical_path(lambda a: 3 if a.kind is Kind.B else 0) == 3 * (m + k - 1)


def test_order_keeps_transfers_beside_what_they_carry() -> None:
    assert [str(action) for action in fill_drain(2, 2).order()] == [
        *("0F0", "0SEND_F0", "0F1", "0SEND_F1", "1RECV_F0", "1F0", "1RECV_F1", "1F1"),
        *("1B1", "1SEND_B1", "1B0", "1SEND_B0", "0RECV_B1", "0B1", "0RECV_B0", "0B0"),
    ]


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize(("n", "m"), [(1, 3), (2, 1), (2, 5), (3, 2), (3, 4), (4, 4), (5, 2)])
def test_order_is_the_clock_of_torchgpipe(n: int, m: int, slots: int) -> None:
    clock = [(i, k - i) for k in range(n + m - 1) for i in range(max(1 + k - m, 0), min(1 + k, n))]
    forwards, backwards = [f"{i}F{j}" for i, j in clock], [f"{i}B{j}" for i, j in reversed(clock)]
    assert computing(fill_drain(n, m, slots=slots).order()) == forwards + backwards


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_are_ordered(seed: int) -> None:
    schedule, ran = random_schedule(random.Random(seed))
    assert sorted(map(str, schedule.order())) == sorted(map(str, ran))
    rank = {action: i for i, action in enumerate(schedule.order())}
    assert all(rank[before] < rank[after] for before, after in constraints(schedule))
    assert Schedule.parse(schedule.csv(), slots=schedule.slots) == schedule


@pytest.mark.parametrize("seed", range(20))
def test_any_one_mutation_is_refused(seed: int) -> None:
    generator = random.Random(seed)
    schedule, _ = random_schedule(generator, least=2)  # a single stage may well drop its only backward
    row = generator.choice(schedule.stages)
    action = generator.choice(row)
    i, j = generator.sample([i for i, a in enumerate(row) if a.microbatch == action.microbatch], 2)
    mutants = {
        "dropped": [a for a in row if a != action],
        "doubled": [*row, action],
        "swapped": [row[{i: j, j: i}.get(k, k)] for k in range(len(row))],
        "of the next stage": [replace(a, stage=a.stage + 1) if a == action else a for a in row],
        "of no micro-batch": [replace(a, microbatch=9) if a == action else a for a in row],
    }
    if action.kind is Kind.R:  # a backward may do without
        del mutants["dropped"]
    for mutation, mutant in mutants.items():
        rows = [mutant if stage is row else stage for stage in schedule.stages]
        assert refused(rows, schedule.num_microbatches, schedule.slots), f"{action} {mutation}"


def test_refuses_just_what_cannot_run() -> None:
    """Any two actions of a stage swapped, with any number of slots."""
    generator = random.Random(0)
    seen = []
    for _ in range(300):
        schedule, _ = random_schedule(generator)
        rows = [list(row) for row in schedule.stages]
        row = generator.choice(rows)
        i = generator.randrange(len(row) - 1)
        j = min(i + generator.choice([1, 1, 2, 3]), len(row) - 1)
        row[i], row[j] = row[j], row[i]
        slots = generator.randrange(1, 4)
        seen.append(Simulation(len(rows), schedule.num_microbatches, slots).finishes(rows))
        why = refused(rows, schedule.num_microbatches, slots)
        assert (why is None) == seen[-1], (rows, slots, why)
    assert 50 < sum(seen) < 250


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
        ("0F0,1F1", "stage 0 does 1F1, where it has to do 0F1"),
        ("0F1", "stage 0 does nothing, where it has to do 0F0"),
        ("0F0,0SEND_F0", "stage 0 does 0F0 0SEND_F0, where it has to do 0F0"),
        ("0RECV_F0,0F0", "stage 0 does 0RECV_F0 0F0, where it has to do 0F0"),
        ("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1F1,1RECV_F0,1F0", "1RECV_F1 meets 0SEND_F0: an edge keeps"),
        ("0RECV_B1,0B1,0RECV_B0,0B0\n1B0,1SEND_B0,1B1,1SEND_B1", "0RECV_B1 meets 1SEND_B0: an edge keeps"),
        ("0F0,F1", "'F1' is not an action; expected a form like 2F0"),
        ("0F0,0F-1", "'0F-1' is not an action"),
        ("0F0,0F1 0B1", "'0F1 0B1' is not an action"),
        ("", "num_stages must be at least 1, got 0"),
    ],
)
def test_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Schedule.parse(text)


def test_refuses_numbers_below_one() -> None:
    for name, make in {
        "num_stages": lambda: fill_drain(0, 2),
        "num_microbatches": lambda: fill_drain(2, 0),
        "slots": lambda: fill_drain(2, 2, slots=0),
    }.items():
        with pytest.raises(ValueError, match=f"^{name} must be at least 1, got 0$"):
            make()
    with pytest.raises(ValueError, match=r"^0F2 is of none of the 2 micro-batches$"):
        Schedule((tuple(map(Action.parse, ("0F0", "0F1", "0F2"))),), 2, 2)


def test_reads_csv_with_blanks() -> None:
    schedule = Schedule.parse("\n 0F0, 0SEND_F0,,\n , 1RECV_F0, 1F0\n\n")
    assert schedule == fill_drain(2, 1, backward=False)
    assert hash(schedule) == hash(fill_drain(2, 1, backward=False))
    assert schedule != fill_drain(2, 1, backward=False, slots=2)


def test_finds_a_deadlock_of_too_few_slots() -> None:
    eager, steady = fill_drain(2, 4).stages[0], one_forward_one_backward(2, 4).stages
    forwards = tuple(a for a in eager if a.kind in (Kind.F, Kind.SEND_F))
    backwards = tuple(a for a in steady[0] if a.kind in (Kind.RECV_B, Kind.B))
    rows = (forwards + backwards, steady[1])
    assert Schedule(rows, 4, 2).num_stages == 2
    stuck = "^deadlock with 1 slots: 0SEND_F3 waits for 1RECV_F2, 1SEND_B1 waits for 0RECV_B0$"
    with pytest.raises(ValueError, match=stuck):
        Schedule(rows, 4, 1)


def test_finds_a_deadlock_of_any_number_of_slots() -> None:
    hasty = "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1"
    patient = "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1"
    stuck = "^deadlock with 9 slots: 0RECV_B0 waits for 1SEND_B0, 1RECV_F1 waits for 0SEND_F1$"
    with pytest.raises(ValueError, match=stuck):
        Schedule.parse(f"{hasty}\n{patient}", slots=9)


def test_parts_of_fill_drain() -> None:
    schedule = fill_drain(2, 2, slots=1)
    ahead, back = schedule.forward_part(), schedule.backward_part()
    assert ahead == fill_drain(2, 2, slots=1, backward=False) == ahead.forward_part()
    assert back.csv() == "0RECV_B1,0B1,0RECV_B0,0B0\n1B1,1SEND_B1,1B0,1SEND_B0"
    assert str(back) == "stage 0   .  0B1 0B0\nstage 1  1B1 1B0"
    assert back.slots == 1
    assert ahead.order() + back.order() == schedule.order()
    with pytest.raises(ValueError, match=r"^the schedule has no backwards$"):
        ahead.backward_part()
    with pytest.raises(ValueError, match=r"^the schedule has no forwards$"):
        back.forward_part()


def test_one_forward_one_backward_cannot_be_split() -> None:
    schedule = one_forward_one_backward(2, 3)
    assert str(schedule) == "stage 0  0F0 0F1  .  0B0 0F2 0B1  .  0B2\nstage 1   .  1F0 1B0 1F1 1B1 1F2 1B2"
    # What shares a tick: forwards first, then backwards.
    ticks = ["0F0", "0F1 1F0", "1B0", "1F1 0B0", "0F2 1B1", "1F2 0B1", "1B2", "0B2"]
    assert " ".join(computing(schedule.order())) == " ".join(ticks)
    for part in (schedule.forward_part, schedule.backward_part):
        with pytest.raises(ValueError, match=r"^0F2 comes after 0B0, so the loss cannot come in between$"):
            part()


def test_times_of_unequal_actions() -> None:
    longer = {"0F0": 2, "1RECV_F0": 2, "1F0": 5, "1RECV_F1": 2, "1F1": 4}

    def times(schedule: Schedule) -> list[list[float]]:
        ends = schedule.times(lambda action: longer.get(str(action), 1))
        return [[ends[action] for action in row] for row in schedule.stages]

    schedule = fill_drain(2, 2, backward=False)
    assert times(schedule) == [[2, 3, 4, 5], [5, 10, 12, 16]]
    assert schedule.critical_path(lambda action: longer.get(str(action), 1)) == 16
    # 0SEND_F1 waits from 4 to 5, when 1RECV_F0 frees the only slot.
    assert times(replace(schedule, slots=1)) == [[2, 3, 4, 6], [5, 10, 12, 16]]


@pytest.mark.parametrize("seed", range(20))
def test_actions_begin_when_the_last_cause_ends(seed: int) -> None:
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
def test_a_slow_stage_needs_slots(slow: int, slots: int) -> None:
    """Sent at 1, 2, 3, 4; received at 1, 1 + slow, ..."""
    schedule = fill_drain(2, 4, backward=False, slots=1)
    assert schedule.slots_needed(lambda a: (1, slow)[a.stage] if a.kind is Kind.F else 0) == slots
    assert schedule.slots_needed() == 1


def test_slots_needed_are_enough_and_no_fewer_are() -> None:
    generator = random.Random(0)
    needed = []
    for _ in range(100):
        schedule, _ = random_schedule(generator)
        seconds = random_seconds(generator, schedule).__getitem__
        needed.append(schedule.slots_needed(seconds))
        unhindered = replace(schedule, slots=schedule.num_microbatches).times(seconds)
        assert replace(schedule, slots=needed[-1]).times(seconds) == unhindered
        fewer = needed[-1] - 1
        if fewer and not refused(schedule.stages, schedule.num_microbatches, fewer):
            assert replace(schedule, slots=fewer).times(seconds) != unhindered
    assert {1, 2, 3} <= set(needed)


@pytest.mark.parametrize("backward_takes", [1, 3])
@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 1), (3, 4), (4, 32), (8, 8)])
def test_bubble_is_what_fill_drain_idles(k: int, m: int, backward_takes: int) -> None:
    length = fill_drain(k, m).critical_path(lambda a: {Kind.F: 1, Kind.B: backward_takes}.get(a.kind, 0))
    assert 1 - m * (1 + backward_takes) / length == pytest.approx(bubble(k, m))
    assert bubble(3, 4) == pytest.approx(2 / 6)


def test_a_large_schedule_is_checked_fast() -> None:
    """Of the processor's time, some tenths of a second at most; what is quadratic takes minutes."""
    begin = time.process_time()
    assert len(fill_drain(8, 512).order()) == 512 * (6 * 8 - 4)
    assert time.process_time() - begin < 1
