"""The proof that schedules over several processes cannot deadlock."""

from __future__ import annotations

from itertools import product

import pytest

from gpipe_fast.schedule import SCHEDULES, Schedule, fill_drain
from gpipe_fast.schedule.unbuffered import check_unbuffered


@pytest.mark.parametrize(
    ("name", "num_stages", "num_microbatches"),
    list(product(("gpipe", "1f1b", "zb-h1"), (1, 2, 3, 5, 9), (1, 2, 4, 9, 20))),
)
def test_our_schedules_are_free_of_deadlock(name: str, num_stages: int, num_microbatches: int) -> None:
    """With every skip connection that there can be, and in parts that run apart."""
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


def chain(num_stages: int, ahead: dict[int, int], num_microbatches: int = 12, slots: int = 12) -> Schedule:
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
    return Schedule.parse("\n".join(rows), slots=slots)


def drain(num_stages: int, ahead: dict[int, int]) -> Schedule:
    """Returns backwards alone: the mirror image of `chain`."""
    mirrored = {"SEND_F": "SEND_B", "RECV_F": "RECV_B", "F": "B"}
    rows = []
    for row in reversed(chain(num_stages, ahead).stages):
        cells = [f"{num_stages - 1 - a.stage}{mirrored[a.kind.value]}{a.microbatch}" for a in row]
        rows.append(",".join(cells))
    return Schedule.parse("\n".join(rows), slots=12)


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_receiving_ahead_is_harmless_without_skips(slots: int) -> None:
    check_unbuffered(chain(3, {1: min(2, slots), 2: min(2, slots)}, slots=slots))


@pytest.mark.parametrize(
    ("schedule", "skips", "first"),
    [
        (chain(3, {1: 6}), [(0, 2)], "0SEND_F5"),
        (chain(3, {1: 7}), [(0, 2)], "0SEND_F"),
        (chain(4, {1: 6}), [(0, 2)], "0SEND_F5"),
        (chain(4, {1: 8}), [(0, 3)], "0SEND_F7"),
        (chain(4, {2: 8}), [(0, 3)], "SEND_F"),
        (chain(4, {2: 6}), [(1, 3)], "1SEND_F5"),
        (chain(5, {3: 10}), [(0, 1), (0, 4)], "SEND_F"),
        (drain(3, {1: 6}), [(0, 2)], "2SEND_B5"),
        (drain(4, {2: 8}), [(0, 3)], "SEND_B"),
        (drain(4, {1: 7}), [(1, 3)], "3SEND_B"),
    ],
)
def test_schedules_that_deadlock_are_rejected(
    schedule: Schedule, skips: list[tuple[int, int]], first: str
) -> None:
    """A stage receives more micro-batches, before it passes on the first, than skips may be under way."""
    check_unbuffered(schedule)
    with pytest.raises(ValueError, match=f"^deadlock between processes with 12 slots.*{first}"):
        check_unbuffered(schedule, skips)


def test_several_stages_of_a_process_are_rejected() -> None:
    schedule = SCHEDULES["interleaved"](4, 4, num_ranks=2)
    with pytest.raises(ValueError, match=r"^the schedule runs stages \[0, 2\] on one rank"):
        check_unbuffered(schedule)


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
