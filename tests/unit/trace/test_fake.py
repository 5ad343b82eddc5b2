"""Fake tensors with the strides and dtypes that real kernels return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.trace.fake import RealLayouts

IMAGES = torch.randn(2, 4, 5, 5)
LAST = IMAGES.to(memory_format=torch.channels_last)
OPERATORS: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "group norm": (lambda x: F.group_norm(x, 2), LAST),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), LAST),
    "padding": (lambda x: F.pad(x, (1, 1)), LAST),
    "gated unit": (lambda x: F.glu(x, 1), LAST),
    "permuted": (lambda x: F.pad(x, (0, 2)), torch.randn(3, 4, 5).permute(2, 0, 1)),
    "sum": (lambda x: x.sum(1), LAST),
    "contiguous": (lambda x: F.group_norm(x, 2), IMAGES),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_strides_are_those_of_the_real_kernel(name: str) -> None:
    function, x = OPERATORS[name]
    mode = RealLayouts()
    fake = mode.from_tensor(x)
    with mode:
        found = function(fake)
    real = function(x)
    assert (found.shape, found.stride(), found.dtype) == (real.shape, real.stride(), real.dtype)
