"""The schedules that have names, by their drawings, actions and bubbles, and the choice of one."""

from __future__ import annotations

import itertools
import re

import pytest

from gpipe_fast.schedule import Action, Kind, Schedule, fill_drain, interleaved, one_f_one_b, zb_h1
from gpipe_fast.schedule.schedules import schedule_for


def test_a_schedule_and_a_function_are_schedules() -> None:
    wanted = one_f_one_b(3, 4)
    assert all(schedule_for(choice, 3, 4) == wanted for choice in (wanted, one_f_one_b, "1f1b"))


def test_recomputes_are_added() -> None:
    assert schedule_for(fill_drain(2, 2), 2, 2, recomputed=[0]) == fill_drain(2, 2, recomputed=[0])


def test_only_the_interleaved_one_depends_on_the_devices() -> None:
    assert schedule_for("interleaved", 4, 4, num_devices=2) == interleaved(4, 4, num_ranks=2)
    assert schedule_for("interleaved", 4, 4) == interleaved(4, 4)
    assert schedule_for("gpipe", 4, 4, num_devices=2) == fill_drain(4, 4)


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


@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 8), (4, 3)])
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
    with pytest.raises(ValueError, match=r"^the schedule has no forwards$"):
        backward.forward_part()


NUMBERS = [(1, 4), (2, 1), (3, 2), (3, 7), (4, 8)]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), NUMBERS)
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_stage_of_1f1b_keeps_one_micro_batch_for_itself_and_each_later_stage(
    num_stages: int, num_microbatches: int, recomputes: bool
) -> None:
    recomputed = range(num_microbatches - 1) if recomputes else ()
    schedule = one_f_one_b(num_stages, num_microbatches, recomputed=recomputed)
    for stage, actions in enumerate(schedule.stages):
        kept, most = 0, 0
        for action in actions:
            kept += (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.W))
            most = max(most, kept)
        assert [a.microbatch for a in actions if a.kind in (Kind.B, Kind.I)] == list(range(num_microbatches))
        assert kept == 0
        assert most == min(num_stages - stage, num_microbatches)


def seconds(action: Action) -> float:
    return {Kind.F: 1.0, Kind.B: 2.0}.get(action.kind, 0.0)


@pytest.mark.parametrize(("per_rank", "num_ranks"), [(1, 3), (2, 1), (2, 4), (3, 2), (3, 3)])
def test_interleaved_ranks_run_their_stages_in_turn(per_rank: int, num_ranks: int) -> None:
    for num_microbatches in (1, 2, 3, 4, 7, 12, 13):
        for recomputed in (None, (), range(num_microbatches)):
            schedule = interleaved(
                per_rank * num_ranks, num_microbatches, num_ranks=num_ranks, recomputed=recomputed
            )
            assert schedule.rank_of == {i: i % num_ranks for i in range(per_rank * num_ranks)}
            assert not schedule.defers_weights


@pytest.mark.parametrize(("num_ranks", "rounds"), [(2, 1), (2, 4), (3, 2), (4, 1)])
def test_the_bubble_of_interleaved_is_divided_by_the_stages_of_a_rank(num_ranks: int, rounds: int) -> None:
    num_microbatches = rounds * num_ranks
    plain = one_f_one_b(num_ranks, num_microbatches).critical_path(seconds) - 3 * num_microbatches
    for per_rank in (1, 2, 3):
        schedule = interleaved(per_rank * num_ranks, num_microbatches, num_ranks=num_ranks)
        assert schedule.critical_path(seconds) - 3 * per_rank * num_microbatches == plain


def test_the_drawing_of_interleaved() -> None:
    text = str(interleaved.__doc__)
    drawing = "\n".join(re.findall(r"^        (rank .*)$", text, re.MULTILINE))
    assert str(interleaved(4, 4, num_ranks=2)) == drawing


def test_unequal_ranks_are_refused() -> None:
    message = "equally many stages, got 5 stages for 2 ranks; choose a balance with a multiple of 2"
    with pytest.raises(ValueError, match=message):
        interleaved(5, 4, num_ranks=2)


ZB_NUMBERS = [(1, 4), (2, 1), (3, 2), (3, 7), (4, 4), (6, 16)]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), ZB_NUMBERS)
def test_the_bubble_of_zb_h1_is_that_of_the_paper(num_stages: int, num_microbatches: int) -> None:
    """F, I and W take a tick each: the bubble is K - 1 ticks, and 3 (K - 1) for 1F1B."""
    ticks = zb_h1(num_stages, num_microbatches).critical_path()
    assert ticks >= 3 * num_microbatches + num_stages - 1
    if num_microbatches >= num_stages:
        assert ticks == 3 * num_microbatches + num_stages - 1


@pytest.mark.parametrize(("num_stages", "num_microbatches"), ZB_NUMBERS)
def test_no_stage_of_zb_h1_holds_more_than_the_first_of_1f1b(num_stages: int, num_microbatches: int) -> None:
    for actions in zb_h1(num_stages, num_microbatches, recomputed=range(num_microbatches)).stages:
        held = itertools.accumulate((a.kind is Kind.F) - (a.kind is Kind.W) for a in actions)
        assert max(held) <= min(num_stages, num_microbatches)
        for kind in (Kind.F, Kind.I, Kind.W):
            assert [a.microbatch for a in actions if a.kind is kind] == list(range(num_microbatches))


def test_the_drawing_of_zb_h1() -> None:
    text = str(zb_h1.__doc__)
    drawing = "\n".join(re.findall(r"^        (stage .*)$", text, re.MULTILINE))
    assert str(zb_h1(3, 4)) == drawing
