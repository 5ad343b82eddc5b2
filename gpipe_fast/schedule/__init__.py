"""Schedules: the ordered actions of every stage.

The input is the number of stages and of micro-batches; the output is a `Schedule`, the validated actions of
every stage. The package is plain Python on integers: it imports neither torch nor other packages of
gpipe_fast, and any package may import it.
"""

from gpipe_fast.schedule.actions import BACKWARD, TRANSFERS, Action, Kind
from gpipe_fast.schedule.choice import SCHEDULES, ScheduleChoice, schedule_for
from gpipe_fast.schedule.fill_drain import bubble, fill_drain
from gpipe_fast.schedule.interleaved import interleaved
from gpipe_fast.schedule.one_f_one_b import one_f_one_b
from gpipe_fast.schedule.schedule import Schedule
from gpipe_fast.schedule.simulation import Simulation, simulate
from gpipe_fast.schedule.zb_h1 import zb_h1

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
