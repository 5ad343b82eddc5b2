"""1F1B: valid for any numbers, early backwards, and few micro-batches in flight."""

from __future__ import annotations

import pytest

from gpipe_fast.schedule import Action, Kind, fill_drain, one_f_one_b

NUMBERS = [(k, m) for k in (1, 2, 3, 4) for m in (1, 2, 4, 7, 8)]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), NUMBERS)
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_stage_keeps_one_micro_batch_for_itself_and_each_later_stage(
    num_stages: int, num_microbatches: int, recomputes: bool
) -> None:
    recomputed = range(num_microbatches - 1) if recomputes else ()
    schedule = one_f_one_b(num_stages, num_microbatches, recomputed=recomputed)
    for stage, actions in enumerate(schedule.stages):
        kept, most = 0, 0
        for action in actions:
            kept += (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.W))
            most = max(most, kept)
        assert kept == 0
        assert most == min(num_stages - stage, num_microbatches)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), NUMBERS)
def test_it_takes_as_long_as_fill_drain(num_stages: int, num_microbatches: int) -> None:
    def seconds(action: Action) -> float:
        return {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 2.0}.get(action.kind, 0.0)

    ours = one_f_one_b(num_stages, num_microbatches).critical_path(seconds)
    assert ours == fill_drain(num_stages, num_microbatches).critical_path(seconds)
    assert ours == 3 * (num_microbatches + num_stages - 1)


def test_gradients_come_in_the_order_of_the_micro_batches() -> None:
    schedule = one_f_one_b(2, 3, recomputed=())
    for actions in schedule.stages:
        assert [a.microbatch for a in actions if a.kind in (Kind.B, Kind.I)] == [0, 1, 2]
    assert str(schedule).splitlines()[1].split()[2:6] == [".", "1F0", "1I0", "1W0"]


def test_no_stage() -> None:
    with pytest.raises(ValueError, match="num_stages must be at least 1"):
        one_f_one_b(0, 3)
