"""Schedules: literal examples, refused ones, and random ones against a simulation of the rules."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from gpipe_fast.schedule import (
    SCHEDULES,
    TRANSFERS,
    Action,
    Kind,
    Schedule,
    fill_drain,
    one_f_one_b,
    schedule_for,
)

Rows = Sequence[Sequence[Action]]
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


def random_schedule(generator: random.Random) -> tuple[Schedule, list[Action]]:
    """Returns a schedule that is valid by construction, and an order in which the simulation ran it."""
    simulation = Simulation(*(generator.randrange(1, 5) for _ in range(3)))
    size = (range(simulation.num_stages), Kind, range(simulation.num_microbatches))
    all_actions = [Action(stage, kind, m) for stage in size[0] for kind in size[1] for m in size[2]]
    ran: list[Action] = []
    while ready := [action for action in all_actions if simulation.can_run(action)]:
        ran.append(generator.choice(ready))
        simulation.run(ran[-1])
    rows = tuple(tuple(a for a in ran if a.stage == stage) for stage in size[0])
    return Schedule(rows, simulation.num_microbatches, simulation.slots), ran


def refusal(rows: Rows, num_microbatches: int, slots: int) -> str | None:
    """Returns the error message for such a schedule, or None if it is valid."""
    try:
        Schedule(tuple(map(tuple, rows)), num_microbatches, slots)
    except ValueError as error:
        return str(error)
    return None


def compute_actions(actions: Sequence[Action]) -> list[str]:
    return [str(action) for action in actions if action.kind not in TRANSFERS]


def constraints(schedule: Schedule) -> Iterator[tuple[Action, Action]]:
    """Yields pairs of an action and one that must wait for it, as the engine enforces them."""
    for row in schedule.ranks:
        yield from pairwise(row)
    for row in schedule.stages:
        for kind, (send, offset) in SENDER.items():
            receives = [action for action in row if action.kind is kind]
            sends = [Action(a.stage + offset, send, a.microbatch) for a in receives]
            yield from zip(sends, receives, strict=True)
            yield from zip(receives, sends[schedule.slots :], strict=False)


def test_timelines_align_names_of_unequal_width() -> None:
    rows = str(fill_drain(11, 2, backward=False)).splitlines()
    assert rows[0] == "stage 0   0F0  0F1"
    assert rows[10] == "stage 10 " + "  .  " * 10 + " 10F0 10F1"


def test_order_of_computations_equals_torchgpipes_clock() -> None:
    for n, m, slots in ((1, 3, 1), (2, 1, 2), (2, 5, 1), (3, 4, 2), (5, 2, 5)):
        clock = [(i, k - i) for k in range(n + m - 1) for i in range(max(1 + k - m, 0), min(1 + k, n))]
        forwards, backwards = [f"{i}F{j}" for i, j in clock], [f"{i}B{j}" for i, j in reversed(clock)]
        assert compute_actions(fill_drain(n, m, slots=slots).order()) == forwards + backwards


def test_schedules_are_refused_exactly_if_they_cannot_run() -> None:
    """Swaps two actions of a stage and draws a number of slots."""
    generator = random.Random(0)
    completes = []
    for _ in range(120):
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
    assert 20 < sum(completes) < 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0SEND_F0\n1F0", "stage 1 does 1F0, where it has to do 1RECV_F0 1F0"),
        ("0F0,0F0", "stage 0 does 0F0 0F0, where it has to do 0F0"),
        ("0F0,0F1,0B1", "stage 0 does 0F0, where it has to do 0F0 0B0"),
        ("0F0,0B0,0R0", "stage 0 does 0F0 0B0 0R0, where it has to do 0F0 0R0 0B0"),
        ("0F0,0SEND_F0,1RECV_F0\n1F0", "stage 1 runs on two ranks"),
        ("0F1", "stage 0 does nothing, where it has to do 0F0"),
        (
            "0RECV_B1,0B1,0RECV_B0,0B0\n1B0,1SEND_B0,1B1,1SEND_B1",
            "0RECV_B1 would receive from 1SEND_B0, but a connection keeps",
        ),
    ],
)
def test_errors_of_invalid_schedules_name_the_cause(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Schedule.parse(text)


def test_csv_with_blanks_is_parsed() -> None:
    schedule = Schedule.parse("\n 0F0, 0SEND_F0,,\n , 1RECV_F0, 1F0\n\n")
    assert schedule == fill_drain(2, 1, backward=False)
    assert hash(schedule) == hash(fill_drain(2, 1, backward=False))
    assert schedule != fill_drain(2, 1, backward=False, slots=2)


def test_one_forward_one_backward_cannot_be_split() -> None:
    schedule = one_f_one_b(2, 3)
    assert str(schedule) == "stage 0  0F0 0F1  .  0B0 0F2 0B1  .  0B2\nstage 1   .  1F0 1B0 1F1 1B1 1F2 1B2"
    # Within a tick, forwards come before backwards.
    ticks = ["0F0", "0F1 1F0", "1B0", "1F1 0B0", "0F2 1B1", "1F2 0B1", "1B2", "0B2"]
    assert " ".join(compute_actions(schedule.order())) == " ".join(ticks)
    for part in (schedule.forward_part, schedule.backward_part):
        with pytest.raises(ValueError, match=r"^0F2 comes after 0B0, so the loss cannot come in between$"):
            part()


@pytest.mark.parametrize("seed", range(20))
def test_actions_begin_when_their_last_dependency_ends(seed: int) -> None:
    generator = random.Random(seed)
    schedule, ran = random_schedule(generator)
    assert sorted(map(str, schedule.order())) == sorted(map(str, ran))
    assert Schedule.parse(schedule.csv(), slots=schedule.slots) == schedule
    rank = {action: i for i, action in enumerate(schedule.order())}
    assert all(rank[before] < rank[after] for before, after in constraints(schedule))
    seconds = {action: float(generator.choice([0, 1, 2, 3, 7])) for action in ran}
    ends = schedule.times(seconds.__getitem__)
    begins = dict.fromkeys(seconds, 0.0)
    for before, after in constraints(schedule):
        begins[after] = max(begins[after], ends[before])
    assert ends == {action: begins[action] + seconds[action] for action in seconds}
    assert schedule.critical_path(seconds.__getitem__) == max(ends.values())


def test_slots_needed_are_sufficient_and_minimal() -> None:
    generator = random.Random(0)
    needed = []
    for _ in range(100):
        schedule, ran = random_schedule(generator)
        seconds = {action: float(generator.choice([0, 1, 2, 3, 7])) for action in ran}.__getitem__
        needed.append(schedule.slots_needed(seconds))
        unlimited = replace(schedule, slots=schedule.num_microbatches).times(seconds)
        assert replace(schedule, slots=needed[-1]).times(seconds) == unlimited
        fewer = needed[-1] - 1
        if fewer and not refusal(schedule.stages, schedule.num_microbatches, fewer):
            assert replace(schedule, slots=fewer).times(seconds) != unlimited
    assert {1, 2, 3} <= set(needed)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_fewer_slots_never_make_a_step_longer_whose_actions_take_equally_long(name: str) -> None:
    for stages, number in [(2, 4), (2, 8), (4, 4), (4, 16)]:
        schedule = schedule_for(name, stages, number, num_devices=2)
        fewer = schedule.with_fewer_slots(2)
        assert fewer.slots == min(schedule.slots, max(2, schedule.slots_needed())) < max(4, number)
        assert fewer.ranks == schedule.ranks
        assert fewer.critical_path() == schedule.critical_path()
        assert fewer.with_fewer_slots(3) == fewer


@pytest.mark.parametrize("seed", range(20))
def test_orders_around_a_stage_are_the_two_ends_of_all_orders(seed: int) -> None:
    """Late, before a stage's last action comes what it needs; early, after its first what needs that."""
    schedule, ran = random_schedule(random.Random(seed))
    edges = list(constraints(schedule))
    for stage, row in enumerate(schedule.stages):
        late, early = (schedule.order_around(stage, lambda _, is_early=x: is_early) for x in (False, True))
        for order in (late, early):
            assert sorted(map(str, order)) == sorted(map(str, ran))
            rank = {action: i for i, action in enumerate(order)}
            assert all(rank[before] < rank[after] for before, after in edges)
        needed, needing = {row[-1]}, {row[0]}
        while more := {a for a, b in edges if b in needed} - needed:
            needed |= more
        while more := {b for a, b in edges if a in needing} - needing:
            needing |= more
        assert set(late[: late.index(row[-1]) + 1]) == needed
        assert set(early[early.index(row[0]) :]) == needing


@pytest.mark.parametrize("seed", range(20))
def test_late_actions_wait_for_a_stage_even_if_early_ones_need_them(seed: int) -> None:
    generator = random.Random(seed)
    schedule, ran = random_schedule(generator)
    chosen = {action for action in ran if generator.random() < 0.2}
    for stage in range(schedule.num_stages):
        latest = schedule.order_around(stage, lambda _: False)
        order = schedule.order_around(stage, lambda _: True, chosen.__contains__)
        rank = {action: i for i, action in enumerate(order)}
        assert all(rank[before] < rank[after] for before, after in constraints(schedule))
        last = max(i for i, action in enumerate(latest) if action.stage == stage)
        for action in {action for action in latest[:last] if action.stage != stage} & chosen:
            before = {a for a in latest[: latest.index(action)] if a.stage == stage}
            assert {a for a in order[: rank[action]] if a.stage == stage} == before
