"""Schedules: the ordered actions of every stage.

The input is the number of stages and of micro-batches; the output is a `Schedule`, the validated actions of
every stage. The package is plain Python on integers: it imports neither torch nor other packages of
gpipe_fast, and any package may import it.
"""

from gpipe_fast.schedule.actions import BACKWARD, TRANSFERS, Action, Kind
from gpipe_fast.schedule.schedule import Schedule
from gpipe_fast.schedule.schedules import (
    SCHEDULES,
    ScheduleChoice,
    bubble,
    fill_drain,
    interleaved,
    one_f_one_b,
    schedule_for,
    zb_h1,
)
from gpipe_fast.schedule.simulation import Simulation, simulate

__all__ = [
    "BACKWARD",
    "SCHEDULES",
    "TRANSFERS",
    "Action",
    "Kind",
    "Schedule",
    "ScheduleChoice",
    "Simulation",
    "bubble",
    "fill_drain",
    "interleaved",
    "one_f_one_b",
    "schedule_for",
    "simulate",
    "zb_h1",
]
