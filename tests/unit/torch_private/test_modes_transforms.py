"""Transforms of ``torch.func``, JIT traces and forward-mode AD around a call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from gpipe_fast.torch_private.modes import (
    has_dual_level,
    innermost_transform,
    jit_trace,
)


def test_a_transform_is_seen() -> None:
    found = []

    def function(x: Tensor) -> Tensor:
        found.append(innermost_transform() is not None)
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    assert found == [True]
    assert innermost_transform() is None


def test_forward_mode_is_seen() -> None:
    assert not has_dual_level()
    with forward_ad.dual_level():
        assert has_dual_level()
    assert not has_dual_level()


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_a_jit_trace_is_seen() -> None:
    found = []

    def function(x: Tensor) -> Tensor:
        found.append(jit_trace() is not None)
        return x + 1

    torch.jit.trace(function, torch.ones(2), check_trace=False)
    assert found[0]
    assert jit_trace() is None
