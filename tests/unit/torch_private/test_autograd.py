"""Autograd's engine, hooks on saved tensors, and version counters."""

from __future__ import annotations

import torch

from gpipe_fast.torch_private.autograd import (
    keeps_graph,
)


def test_a_backward_knows_whether_its_graph_is_kept() -> None:
    found = []
    x = torch.ones(2, requires_grad=True)
    y = x * x
    y.register_hook(lambda gradient: found.append(keeps_graph()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert found == [True, False]
