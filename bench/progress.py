"""Says on standard error how much of a measurement is done, and about how long the rest takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import TypeVar

# Seconds until the first line, and between two lines.
DELAY_SECONDS, PAUSE_SECONDS = 2.0, 10.0

_Item = TypeVar("_Item")


def shown(items: Sequence[_Item], doing: str) -> Iterator[_Item]:
    """Yields the items; between two of them it may write a line, so that no timed code runs meanwhile.

    Args:
        items: what is worked on, in order; the time left is estimated as if all took equally long.
        doing: what is being done, such as "timing rounds".
    """
    begin = monotonic()
    due = begin + DELAY_SECONDS
    for done, item in enumerate(items):
        now = monotonic()
        if done and now >= due:
            left = (now - begin) / done * (len(items) - done)
            line = f"bench: {doing} ({done} of {len(items)} done), about {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)
            due = now + PAUSE_SECONDS
        yield item
