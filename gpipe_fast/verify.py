"""`verify` compares a step of a `GPipe` with the plain loop; `find_switch` finds what makes them differ."""

from gpipe_fast.inspect.find_switch import SwitchReports, find_switch
from gpipe_fast.inspect.verify import Report, Row, verify

__all__ = ["Report", "Row", "SwitchReports", "find_switch", "verify"]
