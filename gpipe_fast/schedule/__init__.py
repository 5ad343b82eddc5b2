"""Schedules: the ordered actions of every stage.

The input is the number of stages and of micro-batches; the output is a `Schedule`, the validated actions of
every stage. The package is plain Python on integers: it imports neither torch nor other packages of
gpipe_fast, and any package may import it.
"""

from gpipe_fast.schedule.actions import BACKWARD, TRANSFERS, Action, Kind
from gpipe_fast.schedule.fill_drain import bubble, fill_drain
from gpipe_fast.schedule.one_f_one_b import one_f_one_b
from gpipe_fast.schedule.schedule import Schedule

SCHEDULES = {"gpipe": fill_drain, "1f1b": one_f_one_b}
"""The schedules of a step, by name."""

__all__ = [
    "BACKWARD",
    "SCHEDULES",
    "TRANSFERS",
    "Action",
    "Kind",
    "Schedule",
    "bubble",
    "fill_drain",
    "one_f_one_b",
]
