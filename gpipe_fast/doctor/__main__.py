"""Prints the report on this machine."""

from gpipe_fast.inspect.doctor import doctor

print(doctor())
