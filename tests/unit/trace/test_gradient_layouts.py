"""Layouts in which boundary gradients arrive: their order of dimensions, and their mark in a trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_fast.trace.gradient_layouts import GradientLayout, dim_order
from gpipe_fast.trace.joint_graph import GraphRole
from tests.stages import trace_joint


@pytest.mark.parametrize(
    ("strides", "order"),
    [((12, 4, 1), (0, 1, 2)), ((1, 4, 12), (2, 1, 0)), ((0, 4, 1), (1, 2)), ((4, 4, 1), (0, 1, 2)), ((), ())],
)
def test_dimensions_are_ordered_by_their_strides(strides: tuple[int, ...], order: tuple[int, ...]) -> None:
    assert dim_order(strides) == order


def test_a_traced_tangent_has_the_layout_of_the_arriving_gradient() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    plain = trace_joint([nn.Linear(3, 4)], x)
    joint = trace_joint([nn.Linear(3, 4)], x, gradient_layouts=((0, GradientLayout((1, 2))),))
    assert plain.of(GraphRole.TANGENT)[0].meta["val"].stride() == (4, 1)
    assert joint.of(GraphRole.TANGENT)[0].meta["val"].stride() == (1, 2)
    arrive = torch.ops.gpipe_fast.arrive.default
    assert not joint.module.graph.find_nodes(op="call_function", target=arrive)
