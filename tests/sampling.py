"""Random samples of large sets of tests, different for each commit; `make soak` runs the whole sets."""

from __future__ import annotations

import functools
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@functools.cache
def seed() -> str:
    """Returns the seed: the environment variable GPIPE_FAST_SEED, else the commit, else '0'."""
    given = os.environ.get("GPIPE_FAST_SEED")
    if given is not None:
        return given
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "0"
    return done.stdout.strip()


def sample(items: Sequence[T], count: int, *, salt: str) -> list[T]:
    """Draws ``count`` of ``items``, or all if there are fewer; keeps their order.

    Args:
        items: the items, in an order that is the same in every process.
        count: the size of the sample.
        salt: a name; samples with different names are independent.
    """
    chosen = random.Random(f"{seed()}/{salt}").sample(range(len(items)), min(count, len(items)))
    return [items[index] for index in sorted(chosen)]
