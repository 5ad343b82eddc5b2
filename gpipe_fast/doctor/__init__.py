"""`doctor` reports on the machine and on how a model runs there.

``python -m gpipe_fast.doctor`` prints the report on this machine.
"""

from gpipe_fast.inspect.doctor import doctor

__all__ = ["doctor"]
