"""A tensor of a state dict that has not been read yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Entry(NamedTuple):
    """A tensor that can be read.

    Attributes:
        like: a meta tensor of its shape and dtype.
        read: reads the tensor into host memory, each time anew.
    """

    like: Tensor
    read: Callable[[], Tensor]
