"""The proof that schedules over several processes cannot deadlock, beside a simulated network."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise, product

import pytest

from gpipe_fast.schedule import SCHEDULES, Schedule, fill_drain, unbuffered
from gpipe_fast.schedule.actions import TRANSFERS, Action, Kind
from gpipe_fast.schedule.unbuffered import check_unbuffered


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_our_schedules_are_free_of_deadlock(name: str) -> None:
    """With every skip connection that there can be, and in parts that run apart."""
    for num_stages, num_microbatches in product((1, 2, 5, 9), (1, 4, 20)):
        schedule = SCHEDULES[name](num_stages, num_microbatches, recomputed=[0])
        skips = [(s, t) for t in range(num_stages) for s in range(t)]
        check_unbuffered(schedule, skips)
        if name == "gpipe":
            check_unbuffered(schedule.forward_part(), skips)
            check_unbuffered(schedule.backward_part(), skips)
            check_unbuffered(fill_drain(num_stages, num_microbatches, slots=1, backward=False), skips)


@pytest.mark.parametrize(
    ("num_processes", "per_process", "num_microbatches"), [(2, 2, 4), (2, 3, 5), (4, 2, 8)]
)
def test_several_stages_in_each_process(num_processes: int, per_process: int, num_microbatches: int) -> None:
    num_stages = num_processes * per_process
    skips = [(s, t) for t in range(num_stages) for s in range(t)]
    schedule = SCHEDULES["interleaved"](num_stages, num_microbatches, num_ranks=num_processes, recomputed=[0])
    check_unbuffered(schedule, skips, num_processes)
    for name in ("gpipe", "1f1b", "zb-h1"):
        check_unbuffered(SCHEDULES[name](num_stages, num_microbatches), skips, num_processes)


def chain(num_stages: int, ahead: dict[int, int], num_microbatches: int = 12) -> Schedule:
    """Returns forwards, where stage k receives ``ahead[k]`` micro-batches before it computes the first."""
    rows = []
    for k in range(num_stages):
        receives = [f"{k}RECV_F{m}" for m in range(num_microbatches)] if k > 0 else []
        first = ahead.get(k, 1)
        row, receives = receives[:first], receives[first:]
        for m in range(num_microbatches):
            row.append(f"{k}F{m}")
            row += [f"{k}SEND_F{m}"] if k < num_stages - 1 else []
            row += [receives.pop(0)] if receives else []
        rows.append(",".join(row))
    return Schedule.parse("\n".join(rows), slots=12)


@pytest.mark.parametrize(
    ("schedule", "skips"),
    [
        (chain(3, {1: 6}), [(0, 2)]),
        (chain(4, {1: 8}), [(0, 3)]),
        (chain(4, {2: 6}), [(1, 3)]),
        (chain(5, {3: 10}), [(0, 1), (0, 4)]),
    ],
)
def test_schedules_that_deadlock_are_rejected(schedule: Schedule, skips: list[tuple[int, int]]) -> None:
    """A stage receives more micro-batches, before it passes on the first, than skips may be under way."""
    check_unbuffered(schedule)
    with pytest.raises(ValueError, match=r"^deadlock between processes with 12 slots") as error:
        check_unbuffered(schedule, skips)
    _, _, actions = str(error.value).partition(": ")
    named = [Action.parse(each) for each in actions.partition(";")[0].split(" waits for ")]
    assert named[0] == named[-1]
    waits = unbuffered._waits(schedule, skips)
    assert all(after in waits[before] for before, after in pairwise(named))


def test_orders_that_mix_up_skips_are_rejected() -> None:
    text = """
        0F0,0SEND_F0,0F1,0SEND_F1
        1RECV_F0,1RECV_F1,1F1,1SEND_F1,1F0,1SEND_F0
        2RECV_F1,2F1,2RECV_F0,2F0
    """
    schedule = Schedule.parse(text)
    check_unbuffered(schedule)
    with pytest.raises(
        ValueError, match=r"^0SEND_F0 sends a skip tensor to a stage that expects that of micro-"
    ):
        check_unbuffered(schedule, [(0, 2)])


def test_several_stages_of_a_process_are_rejected() -> None:
    schedule = SCHEDULES["interleaved"](4, 4, num_ranks=2)
    with pytest.raises(ValueError, match=r"^the schedule runs stages \[0, 2\] on one rank"):
        check_unbuffered(schedule)


Skips = Collection[tuple[int, int]]


class Network:
    """Processes of one stage each, whose boundary tensors have no place but the slots of their receivers.

    The receive of a tensor begins when the one before has arrived and a slot is free, and the receives of its
    skip tensors begin with it. A tensor travels only when its receive has begun.

    Args:
        schedule: the actions of the processes.
        skips: for each skip connection, the stage that stashes and the stage that pops.
        ahead: how many skip tensors a sender may have under way, for each stage that they pass.
        together: whether the tensors of a SEND travel together, when the receives of all of them have begun.
            Otherwise one after the other, the boundary first.
    """

    def __init__(self, schedule: Schedule, skips: Skips, ahead: int, together: bool) -> None:
        self.slots, self.ahead, self.together = schedule.slots, ahead, together
        self.programs = [list(actions) for actions in schedule.stages]
        self.skips = list(skips)
        # By stage and kind of its RECV: how many boundary tensors have arrived, and were taken.
        self.arrived: Counter[tuple[int, Kind]] = Counter()
        self.taken: Counter[tuple[int, Kind]] = Counter()
        self.sent: Counter[tuple[int, Kind]] = Counter()
        self.left: dict[int, list[tuple[int, bool]]] = {}  # by stage, the tensors of its SEND that wait

    def deadlocks(self) -> bool:
        """Runs the processes as far as they come, and returns whether some actions are left."""
        while any(self._advance(stage) for stage in range(len(self.programs))):
            pass
        return any(self.programs)

    def _advance(self, stage: int) -> bool:
        """Runs the next action of a stage, or a part of it, and returns whether that was possible."""
        if not self.programs[stage]:
            return False
        action = self.programs[stage][0]
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            if self.arrived[stage, action.kind] == self.taken[stage, action.kind]:
                return False
            self.taken[stage, action.kind] += 1
        elif action.kind in TRANSFERS:
            return self._send(stage, action.kind)
        del self.programs[stage][0]
        return True

    def _send(self, stage: int, kind: Kind) -> bool:
        forward = kind is Kind.SEND_F
        ends = self.skips if forward else [(last, first) for first, last in self.skips]
        skips = [(receiver, False) for sender, receiver in ends if sender == stage]
        left = self.left.setdefault(stage, [(stage + (1 if forward else -1), True), *skips])
        number, receive = self.sent[stage, kind], Kind.RECV_F if forward else Kind.RECV_B
        under_way = [0 if is_next else self.ahead * abs(receiver - stage) for receiver, is_next in left]
        ready = [
            self._has_begun(receiver, receive, number - own)
            for (receiver, _), own in zip(left, under_way, strict=True)
        ]
        if not (all(ready) if self.together else ready[0]):
            return False
        for receiver, is_boundary in left if self.together else left[:1]:
            self.arrived[receiver, receive] += is_boundary
        del left[: len(left) if self.together else 1]
        if not left:
            del self.left[stage]
            self.sent[stage, kind] += 1
            del self.programs[stage][0]
        return True

    def _has_begun(self, stage: int, kind: Kind, number: int) -> bool:
        """Returns whether a stage has begun to receive the tensors of this number."""
        return number <= self.arrived[stage, kind] and number < self.taken[stage, kind] + self.slots


def moved(schedule: Schedule, generator: random.Random, moves: int) -> Schedule | None:
    """Returns a schedule in which some actions are moved; None if it is not valid."""
    rows = [list(actions) for actions in schedule.stages]
    for _ in range(moves):
        row = generator.choice(rows)
        where = generator.randrange(len(row))
        action = row.pop(where)
        row.insert(max(0, where - generator.randint(1, 6)), action)
    try:
        return Schedule(tuple(map(tuple, rows)), schedule.num_microbatches, schedule.slots)
    except ValueError:
        return None


def generated(seed: int, count: int) -> Iterator[tuple[Schedule, Sequence[tuple[int, int]]]]:
    """Yields valid schedules, made by moving actions of others, and skip connections."""
    generator = random.Random(seed)
    while count:
        num_stages = generator.randint(2, 4)
        name = generator.choice(["gpipe", "1f1b", "zb-h1"])
        whole = SCHEDULES[name](num_stages, generator.randint(2, 5))
        start = Schedule(whole.ranks, whole.num_microbatches, generator.randint(1, 3))
        schedule = moved(start, generator, generator.randint(1, 6))
        pairs = [(s, t) for t in range(num_stages) for s in range(t)]
        if schedule is not None:
            count -= 1
            yield schedule, generator.sample(pairs, generator.randint(0, min(2, len(pairs))))


def rejection(schedule: Schedule, skips: Skips) -> str:
    try:
        check_unbuffered(schedule, skips)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("ahead", "least"), [(0, 2), (unbuffered.MAX_UNDER_WAY_PER_STAGE, 0)])
def test_schedules_that_are_rejected_deadlock_and_others_complete(
    monkeypatch: pytest.MonkeyPatch, ahead: int, least: int
) -> None:
    monkeypatch.setattr(unbuffered, "MAX_UNDER_WAY_PER_STAGE", ahead)
    found: Counter[str] = Counter()
    for schedule, skips in generated(ahead, 80):
        error = rejection(schedule, skips)
        found[error.partition(" ")[0]] += 1
        if not error or error.startswith("deadlock"):
            assert Network(schedule, skips, ahead, together=True).deadlocks() == bool(error), (
                schedule.csv(),
                skips,
            )
        if not error:
            assert not Network(schedule, skips, ahead, together=False).deadlocks(), (schedule.csv(), skips)
    assert found["deadlock"] >= least
    assert found[""] >= 12


def test_more_tensors_than_may_be_under_way() -> None:
    """Four skip tensors may be: stage 1 receives six micro-batches before it passes on the first."""
    ahead = unbuffered.MAX_UNDER_WAY_PER_STAGE
    for number in (5, 6):
        schedule = chain(3, {1: number})
        deadlocks = Network(schedule, [(0, 2)], ahead, together=True).deadlocks()
        assert deadlocks == bool(rejection(schedule, [(0, 2)])) == (number == 6)
