"""Joint graphs: their ports, and the order of parameters and buffers."""

from __future__ import annotations

import torch
from torch import nn

from gpipe_fast.trace.joint_graph import GraphPort, GraphRole, buffers_of, parameters_of
from tests.stages import trace_joint


def test_ports_in_words() -> None:
    assert str(GraphPort(GraphRole.PARAMETER, 3)) == "parameter[3]"
    cast = GraphPort(GraphRole.PARAMETER_CAST, 3, torch.bfloat16)
    assert str(cast) == "parameter_cast[3] to bfloat16"
    assert cast != GraphPort(GraphRole.PARAMETER_CAST, 3, torch.float16)


def test_tied_tensors_have_one_port() -> None:
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = first.weight
    first.register_buffer("table", torch.ones(2))
    last.register_buffer("same", first.table)
    assert [id(p) for p in parameters_of([first, last])] == [id(first.weight), id(first.bias), id(last.bias)]
    assert [id(b) for b in buffers_of([first, last])] == [id(first.table)]


def test_results_come_before_placeholders_of_a_role() -> None:
    joint = trace_joint([nn.Linear(3, 3), nn.BatchNorm1d(3)], torch.randn(4, 3, requires_grad=True))
    results = {node for _, node in joint.outputs}
    assert set(joint.of(GraphRole.BUFFER).values()) <= results
    assert len(joint.of(GraphRole.PARAMETER_GRADIENT)) == 4
    (placeholder,) = joint.of(GraphRole.INPUT).values()
    assert placeholder.op == "placeholder"
    assert joint.differentiable_outputs() == {0}
