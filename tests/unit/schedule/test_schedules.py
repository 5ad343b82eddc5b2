"""The choice of a schedule: by name, a schedule, or a function; and those that a step cannot run."""

from __future__ import annotations

from typing import Any

import pytest

from gpipe_fast.schedule import Schedule, fill_drain, interleaved, one_f_one_b
from gpipe_fast.schedule.schedules import SCHEDULES, schedule_for


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_name_is_a_schedule_of_all_stages_and_micro_batches(name: str) -> None:
    found = schedule_for(name, 4, 8)
    assert (found.num_stages, found.num_microbatches) == (4, 8)


def test_a_schedule_and_a_function_are_schedules() -> None:
    wanted = one_f_one_b(3, 4)
    assert all(schedule_for(choice, 3, 4) == wanted for choice in (wanted, one_f_one_b, "1f1b"))


def test_recomputes_are_added() -> None:
    assert schedule_for(fill_drain(2, 2), 2, 2, recomputed=[0]) == fill_drain(2, 2, recomputed=[0])


def test_only_the_interleaved_one_depends_on_the_devices() -> None:
    assert schedule_for("interleaved", 4, 4, num_devices=2) == interleaved(4, 4, num_ranks=2)
    assert schedule_for("interleaved", 4, 4) == interleaved(4, 4)
    assert schedule_for("gpipe", 4, 4, num_devices=2) == fill_drain(4, 4)


@pytest.mark.parametrize(
    ("choice", "kind", "message"),
    [
        ("fast", ValueError, "schedule must be one of gpipe, .*, or a Schedule, got 'fast'"),
        (lambda k, m: "gpipe", TypeError, r"must return a gpipe_fast\.schedule\.Schedule, got str"),
        (fill_drain(2, 4), ValueError, "has 2 stages and 4 micro-batches, but the step has 2 and 2"),
        (
            fill_drain(2, 2, backward=False),
            ValueError,
            r"stage 0 runs the forwards .* \[0, 1\] and no backwards",
        ),
        (Schedule.from_csv("0F1,0F0,0B0,0B1\n1F1,1F0,1B0,1B1"), ValueError, r"of micro-batches \[1, 0\]"),
    ],
)
def test_schedules_that_a_step_cannot_run_are_refused(
    choice: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        schedule_for(choice, 2, 2)
