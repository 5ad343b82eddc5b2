"""`verify` compares a step of a `GPipe` with the plain loop; `find_switch` finds what makes them differ."""

from gpipe_fast.reports.verify import Report, Row, SwitchReports, find_switch, verify

__all__ = ["Report", "Row", "SwitchReports", "find_switch", "verify"]
