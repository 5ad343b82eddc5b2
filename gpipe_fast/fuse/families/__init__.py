"""The families of fused kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from gpipe_fast.fuse.families import losses, rotary
from gpipe_fast.fuse.family import Case

LOW = (torch.bfloat16, torch.float16)


@functools.cache
def cases(dtypes: frozenset[torch.dtype]) -> tuple[Case, ...]:
    """Returns the cases for a graph with tensors of these dtypes."""
    return tuple(_cases(dtypes))


def _cases(dtypes: frozenset[torch.dtype]) -> Iterator[Case]:
    low = [d for d in LOW if d in dtypes]
    mixes = [(d, d) for d in (torch.float32, *low) if d in dtypes]
    mixes += [(torch.float32, d) for d in low if torch.float32 in dtypes]
    for family in (losses, rotary):
        for stream, own in mixes:
            yield from family.cases(stream, own)
