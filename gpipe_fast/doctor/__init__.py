"""`doctor` reports on the machine and on how a model runs on it; `check` is a self-test with small models.

``python -m gpipe_fast.doctor`` prints the report on this machine; ``--check`` also runs the self-test.
"""

from gpipe_fast.reports.checkup import Case, Checkup, FusedCheck, check
from gpipe_fast.reports.doctor import doctor

__all__ = ["Case", "Checkup", "FusedCheck", "check", "doctor"]
