"""The ports of a traced stage: their roles, and gradients in another layout than the output's."""

from __future__ import annotations

import torch
from torch import nn

from gpipe_fast.trace.gradient_layouts import GradientLayout
from gpipe_fast.trace.ports import TracedPorts
from tests.stages import trace_joint

X = torch.randn(4, 3, requires_grad=True)


def ports_of(*layers: nn.Module, x: torch.Tensor = X) -> TracedPorts:
    return TracedPorts.of_graph(trace_joint(list(layers), x))


def test_random_operators_are_seen() -> None:
    assert ports_of(nn.Dropout(0.5)).draws
    assert not ports_of(nn.Dropout(0.0)).draws
    assert not ports_of(nn.Linear(3, 3)).draws


def test_only_gradients_in_another_layout_are_named() -> None:
    ports = ports_of(nn.Linear(3, 2))
    assert ports.gradient_layouts({0: GradientLayout((2, 1))}) == ()
    assert ports.gradient_layouts({0: GradientLayout((0, 0))}) == ((0, GradientLayout((0, 0))),)
    assert ports.gradient_layouts({}) == ((0, None),)
