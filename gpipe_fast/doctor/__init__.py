"""`doctor` reports on the machine and on how a model runs there; `check` compares small models there.

``python -m gpipe_fast.doctor`` prints the report on this machine, and with ``--check`` the comparison.
"""

from gpipe_fast.inspect.check import Case, Checkup, check
from gpipe_fast.inspect.doctor import doctor

__all__ = ["Case", "Checkup", "check", "doctor"]
