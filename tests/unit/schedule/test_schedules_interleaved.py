"""Interleaved 1F1B: valid for any numbers, a smaller bubble, and its drawing."""

from __future__ import annotations

import re

import pytest

from gpipe_fast.schedule import Action, Kind, interleaved, one_f_one_b


def seconds(action: Action) -> float:
    return {Kind.F: 1.0, Kind.B: 2.0}.get(action.kind, 0.0)


@pytest.mark.parametrize("per_rank", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ranks_run_their_stages_in_turn(per_rank: int, num_ranks: int) -> None:
    for num_microbatches in range(1, 14):
        for recomputed in (None, (), range(num_microbatches)):
            schedule = interleaved(
                per_rank * num_ranks, num_microbatches, num_ranks=num_ranks, recomputed=recomputed
            )
            assert schedule.rank_of == {i: i % num_ranks for i in range(per_rank * num_ranks)}
            assert not schedule.defers_weights


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_the_bubble_is_divided_by_the_stages_of_a_rank(num_ranks: int, rounds: int) -> None:
    num_microbatches = rounds * num_ranks
    plain = one_f_one_b(num_ranks, num_microbatches).critical_path(seconds) - 3 * num_microbatches
    for per_rank in (1, 2, 3):
        schedule = interleaved(per_rank * num_ranks, num_microbatches, num_ranks=num_ranks)
        assert schedule.critical_path(seconds) - 3 * per_rank * num_microbatches == plain


def test_the_drawing_in_the_docstring() -> None:
    text = str(interleaved.__doc__)
    drawing = "\n".join(re.findall(r"^        (rank .*)$", text, re.MULTILINE))
    assert str(interleaved(4, 4, num_ranks=2)) == drawing


def test_unequal_ranks_are_refused() -> None:
    message = "equally many stages, got 5 stages for 2 ranks; choose a balance with a multiple of 2"
    with pytest.raises(ValueError, match=message):
        interleaved(5, 4, num_ranks=2)
