"""Joined graphs: those of two parts are the graph of both."""

from __future__ import annotations

import torch
from torch import nn

from gpipe_fast.trace.join import join
from gpipe_fast.trace.joint_graph import JointGraph
from tests.stages import trace_joint


def parts() -> tuple[list[nn.Module], list[nn.Module]]:
    torch.manual_seed(0)
    return [nn.Linear(3, 5), nn.ReLU()], [nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2)]


def joined() -> JointGraph:
    first, last = parts()
    x, y = torch.randn(4, 3, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    return join([trace_joint(first, x), trace_joint(last, y)], [(2, 0), (4, 3)])


def test_ports_and_layers_are_numbered_across_parts() -> None:
    first, last = parts()
    whole = trace_joint([*first, *last], torch.randn(4, 3, requires_grad=True))
    found = joined()
    assert found.num_layers == 5
    assert {port for port, _ in found.inputs} == {port for port, _ in whole.inputs}
    assert {port for port, _ in found.outputs} == {port for port, _ in whole.outputs}
    layers = {(node.meta.get("custom") or {}).get("layer") for node in found.module.graph.nodes}
    assert layers - {None} == {0, 1, 2, 3, 4}
