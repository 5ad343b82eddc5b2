"""Fill-drain, GPipe's schedule: its drawing, its actions, and its bubble."""

from __future__ import annotations

import pytest

from gpipe_fast.schedule import Kind, Schedule, bubble, fill_drain


def test_fill_drain_prints_its_timeline() -> None:
    assert str(fill_drain(3, 4)).splitlines() == [
        "stage 0  0F0 0F1 0F2 0F3  .   .   .   .  0B3 0B2 0B1 0B0",
        "stage 1   .  1F0 1F1 1F2 1F3  .   .  1B3 1B2 1B1 1B0",
        "stage 2   .   .  2F0 2F1 2F2 2F3 2B3 2B2 2B1 2B0",
    ]
    docstring = str(fill_drain.__doc__)
    assert all(line in docstring for line in str(fill_drain(3, 4)).splitlines())


def test_fill_drain_lists_its_actions_as_csv() -> None:
    schedule = fill_drain(2, 2)
    assert schedule.csv().splitlines() == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0B1,0RECV_B0,0B0",
        "1RECV_F0,1F0,1RECV_F1,1F1,1B1,1SEND_B1,1B0,1SEND_B0",
    ]
    assert (schedule.num_stages, schedule.num_microbatches, schedule.slots) == (2, 2, 2)
    assert fill_drain(2, 2, slots=1).slots == 1
    assert fill_drain(1, 2).csv() == "0F0,0F1,0B1,0B0"
    assert fill_drain(3, 1, backward=False).csv() == "0F0,0SEND_F0\n1RECV_F0,1F0,1SEND_F0\n2RECV_F0,2F0"


def test_fill_drain_with_recompute_splits_backwards_that_send_gradients() -> None:
    """Micro-batch 1 does not recompute; stage 0 sends no gradients, so its backwards are not split."""
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
def test_split_backwards_shorten_the_critical_path(k: int, m: int) -> None:
    ticks = {Kind.F: 1, Kind.R: 1, Kind.I: 1, Kind.W: 1, Kind.B: 2}
    parts, whole = fill_drain(k, m, recomputed=range(m)).backward_part(), fill_drain(k, m).backward_part()
    assert parts.critical_path(lambda a: ticks.get(a.kind, 0)) == 3 * m + k - 1
    assert whole.critical_path(lambda a: 3 if a.kind is Kind.B else 0) == 3 * (m + k - 1)


def test_fill_drain_splits_into_forward_and_backward_parts() -> None:
    schedule = fill_drain(2, 2, slots=1)
    forward, backward = schedule.forward_part(), schedule.backward_part()
    assert forward == fill_drain(2, 2, slots=1, backward=False) == forward.forward_part()
    assert backward.csv() == "0RECV_B1,0B1,0RECV_B0,0B0\n1B1,1SEND_B1,1B0,1SEND_B0"
    assert str(backward) == "stage 0   .  0B1 0B0\nstage 1  1B1 1B0"
    assert backward.slots == 1
    assert forward.order() + backward.order() == schedule.order()
    with pytest.raises(ValueError, match=r"^the schedule has no backwards$"):
        forward.backward_part()
    with pytest.raises(ValueError, match=r"^the schedule has no forwards$"):
        backward.forward_part()


@pytest.mark.parametrize("backward_takes", [1, 3])
@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 1), (3, 4), (4, 32), (8, 8)])
def test_bubble_equals_the_idle_fraction_of_fill_drain(k: int, m: int, backward_takes: int) -> None:
    length = fill_drain(k, m).critical_path(lambda a: {Kind.F: 1, Kind.B: backward_takes}.get(a.kind, 0))
    assert 1 - m * (1 + backward_takes) / length == pytest.approx(bubble(k, m))
    assert bubble(3, 4) == pytest.approx(2 / 6)


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0)])
def test_a_bubble_needs_stages_and_micro_batches(numbers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"got {numbers[0]} stages, {numbers[1]} micro-batches"):
        bubble(*numbers)
