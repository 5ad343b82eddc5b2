"""The ports of a traced stage: their roles, and gradients in another layout than the output's."""

from __future__ import annotations

import torch
from torch import nn

from gpipe_fast.trace.joint_graph import GraphRole
from gpipe_fast.trace.ports import TracedPorts
from tests.stages import trace_joint

X = torch.randn(4, 3, requires_grad=True)


def ports_of(*layers: nn.Module, x: torch.Tensor = X) -> TracedPorts:
    return TracedPorts.of_graph(trace_joint(list(layers), x))


def test_ports_have_the_metadata_of_their_tensors() -> None:
    ports = ports_of(nn.Linear(3, 2), nn.BatchNorm1d(2))
    (output,) = ports.of(GraphRole.OUTPUT).values()
    assert (tuple(output.shape), output.stride(), output.dtype) == ((4, 2), (2, 1), torch.float32)
    assert {tuple(t.shape) for t in ports.of(GraphRole.BUFFER).values()} == {(2,), ()}
    assert ports.differentiable_outputs() == {0}
    assert ports.input_gradient_strides() == {0: (3, 1)}
    assert ports.of(GraphRole.SAVED) == {}
    assert ports.at(()).of(GraphRole.OUTPUT)[0].shape == output.shape


def test_an_input_without_a_gradient_has_no_strides() -> None:
    assert ports_of(nn.Linear(3, 2), x=X.detach()).input_gradient_strides() == {}


def test_random_operators_are_seen() -> None:
    assert ports_of(nn.Dropout(0.5)).draws
    assert not ports_of(nn.Dropout(0.0)).draws
    assert not ports_of(nn.Linear(3, 3)).draws


def test_only_gradients_in_another_layout_are_named() -> None:
    ports = ports_of(nn.Linear(3, 2))
    assert ports.gradient_layouts({0: (2, 1)}) == ()
    assert ports.gradient_layouts({0: (0, 0)}) == ((0, (0, 0)),)
    assert ports.gradient_layouts({}) == ((0, None),)
