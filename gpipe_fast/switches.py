"""Switches, which turn off parts of gpipe_fast to find the part that a wrong number comes from.

The environment variable ``GPIPE_FAST_DISABLE`` names the parts to turn off, as in ``templates,fuse``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["disabled"]

VARIABLE = "GPIPE_FAST_DISABLE"
# From the part with the least to the part with the greatest effect on speed.
SWITCHES = {
    "templates": "every new shape is captured anew, instead of being derived from a template",
    "equal-layers": "every stage is captured by itself, instead of once for equal stages and layers",
    "fuse": "stages use no fused kernels",
    "capture": "all layers run in Python, as with backend='eager'",
}

_disabled_in_blocks: list[str] = []


def is_disabled(name: str) -> bool:
    """Returns whether a part is turned off, by the environment variable or by `disabled`.

    Raises:
        ValueError: the environment variable names an unknown part.
    """
    words = [word.strip() for word in os.environ.get(VARIABLE, "").split(",")]
    _check_known(*filter(None, words))
    return name in words or name in _disabled_in_blocks


@contextlib.contextmanager
def disabled(*names: str) -> Iterator[None]:
    """Turns parts off in a block, for all threads. Graphs and programs that a model has keep their effect.

    Args:
        names: keys of `SWITCHES`.

    Raises:
        ValueError: a name is unknown.
    """
    _check_known(*names)
    _disabled_in_blocks.extend(names)
    try:
        yield
    finally:
        for name in names:
            _disabled_in_blocks.remove(name)


def _check_known(*names: str) -> None:
    for name in names:
        if name not in SWITCHES:
            known = ", ".join(SWITCHES)
            raise ValueError(f"{VARIABLE} may name {known}, separated by commas; got {name!r}")
