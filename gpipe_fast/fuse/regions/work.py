"""What a unit's arithmetic costs, in the bytes that a GPU moves meanwhile."""

from __future__ import annotations

import math
import re

from gpipe_fast.fuse.regions.graph import Unit
from gpipe_fast.fuse.regions.values import Draw, Mapped, Reduced, Value

# Bytes that a GPU moves in the time of one operation per element, of a function, of a random number. An H100
# has 33 trillion fp32 instructions per second, half as many of integers, and 3.3 TB/s; a function takes about
# 20 instructions, and a random number 25 of integers.
BYTES_PER_OPERATION, BYTES_PER_FUNCTION, BYTES_PER_DRAW = 0.1, 2.0, 5.0


def work_of(unit: Unit) -> int:
    """Returns the bytes that a GPU moves while it computes a unit."""
    return round(sum(math.prod(v.shape) * _bytes_per_element(v) for v in unit.values))


def reduces(unit: Unit) -> bool:
    """Returns whether a unit computes an element from many elements."""
    return any(isinstance(value, Reduced) for value in unit.values)


def _bytes_per_element(value: Value) -> float:
    if isinstance(value, Draw):
        return BYTES_PER_DRAW
    if not isinstance(value, Mapped):
        return 0.0
    calls = len(re.findall(r"[a-z]\(", value.template.replace("tl.where(", "")))
    return BYTES_PER_OPERATION + calls * BYTES_PER_FUNCTION
