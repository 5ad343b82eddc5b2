"""Random samples of large sets of tests, the same everywhere; `make soak` runs the whole sets."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def seed() -> str:
    """Returns the seed: the environment variable GPIPE_FAST_SEED, else '0'."""
    return os.environ.get("GPIPE_FAST_SEED", "0")


def sample(items: Sequence[T], count: int, *, salt: str) -> list[T]:
    """Draws ``count`` of ``items``, or all if there are fewer; keeps their order.

    Args:
        items: the items, in an order that is the same in every process.
        count: the size of the sample.
        salt: a name; samples with different names are independent.
    """
    chosen = random.Random(f"{seed()}/{salt}").sample(range(len(items)), min(count, len(items)))
    return [items[index] for index in sorted(chosen)]
