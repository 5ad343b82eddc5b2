"""Example arguments on which operators run alone, to measure them, with the layouts and dtypes of a trace.

Floating point numbers are 0.5, integers are zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpipe_fast.strides import span
from gpipe_fast.torch_private.modes import DisableAutocast

# What operators raise if they cannot run alone, as for indices that are out of range.
CANNOT_RUN = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)


class Spec(NamedTuple):
    """The layout and the dtype that stand for a tensor among arguments."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def example(self, device: torch.device | str) -> Tensor:
        """Returns a tensor like the one that it stands for."""
        number = 0.5 if self.dtype.is_floating_point or self.dtype.is_complex else 0
        memory = torch.full((span(self.shape, self.strides),), number, dtype=self.dtype, device=device)
        return memory.as_strided(self.shape, self.strides)


def examples(arguments: Any, device: torch.device | str) -> Any:
    """Returns arguments, which may be nested, with tensors in the place of specs."""
    if isinstance(arguments, Spec):
        return arguments.example(device)
    if isinstance(arguments, (list, tuple)):
        return type(arguments)([examples(each, device) for each in arguments])
    if isinstance(arguments, dict):
        return {name: examples(each, device) for name, each in arguments.items()}
    return arguments


@contextlib.contextmanager
def as_in_a_program() -> Iterator[None]:
    """Runs operators without autograd and autocast in the block."""
    with torch.inference_mode(False), torch.no_grad(), DisableAutocast():
        yield
