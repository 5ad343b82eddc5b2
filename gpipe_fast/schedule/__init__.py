"""Schedules: which stage does what, and in which order.

The numbers of stages and micro-batches come in; a `Schedule`, the validated actions of every stage, goes out.
The package is plain Python on integers: it imports neither torch nor anything of gpipe_fast, and any other
package may import it.
"""

from gpipe_fast.schedule.actions import BACKWARD, TRANSFERS, Action, Kind
from gpipe_fast.schedule.fill_drain import bubble, fill_drain
from gpipe_fast.schedule.schedule import Schedule

__all__ = ["BACKWARD", "TRANSFERS", "Action", "Kind", "Schedule", "bubble", "fill_drain"]
