"""The choice of a schedule: by name, a schedule, or a function that makes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpipe_fast.schedule.actions import Kind, Recomputed
from gpipe_fast.schedule.fill_drain import fill_drain
from gpipe_fast.schedule.interleaved import interleaved
from gpipe_fast.schedule.one_f_one_b import one_f_one_b
from gpipe_fast.schedule.schedule import Schedule
from gpipe_fast.schedule.zb_h1 import zb_h1

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": fill_drain,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
}
"""The schedules of a step, by name."""

ScheduleChoice = str | Schedule | Callable[[int, int], Schedule]


def schedule_for(
    choice: ScheduleChoice,
    num_stages: int,
    num_microbatches: int,
    *,
    num_devices: int = 1,
    recomputed: Recomputed | None = None,
) -> Schedule:
    """Returns the schedule of a step.

    Args:
        choice: a key of `SCHEDULES`, a schedule, or a function of the number of stages and of micro-batches.
        num_stages: K.
        num_microbatches: M.
        num_devices: the number of different devices: that of the ranks of ``'interleaved'``, if over 1.
        recomputed: as for `Schedule.of`.

    Raises:
        TypeError: the function returns no schedule.
        ValueError: there is no schedule of that name; or the schedule is for other numbers, lacks forwards or
            backwards, or runs the forwards of a stage in another order than that of the micro-batches.
    """
    if isinstance(choice, str) and choice not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, or a Schedule, got {choice!r}")
    if isinstance(choice, str):
        has_ranks = choice == "interleaved" and num_devices > 1
        options: dict[str, Any] = {"num_ranks": num_devices} if has_ranks else {}
        return SCHEDULES[choice](num_stages, num_microbatches, recomputed=recomputed, **options)
    found = choice if isinstance(choice, Schedule) else choice(num_stages, num_microbatches)
    if not isinstance(found, Schedule):
        raise TypeError(
            "a function that is passed as schedule must return a gpipe_fast.schedule.Schedule, got "
            f"{type(found).__name__}; make one by Schedule.of or Schedule.from_csv"
        )
    if (found.num_stages, found.num_microbatches) != (num_stages, num_microbatches):
        raise ValueError(
            f"the schedule has {found.num_stages} stages and {found.num_microbatches} micro-batches, but the "
            f"step has {num_stages} and {num_microbatches}; set schedule to a function of both numbers that "
            "returns one"
        )
    for stage, actions in enumerate(found.stages):
        forwards = [action.microbatch for action in actions if action.kind is Kind.F]
        has_backward = any(action.kind in (Kind.B, Kind.I) for action in actions)
        if forwards != sorted(forwards) or not forwards or not has_backward:
            raise ValueError(
                f"stage {stage} runs the forwards of micro-batches {forwards} and "
                f"{'backwards' if has_backward else 'no backwards'}; a step runs both of all micro-batches, "
                "and the forwards in ascending order, because layers may update buffers"
            )
    return Schedule.of(found.ranks, num_microbatches, slots=found.slots, recomputed=recomputed)
