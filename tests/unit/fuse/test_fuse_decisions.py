"""Nodes on which a decision depends: a rounding error in them may change more than a rounding error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.fuse.fuse import decisive_positions
from gpipe_fast.lower.split import JOINT_POSITION, split
from tests.stages import trace_joint
from tests.unit.fuse.graphs import Function

FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], set[str]]] = {
    "comparison": (lambda x: torch.where(x.sin() > 0, x.cos(), x.exp()), {"sin"}),
    "cast to integers": (lambda x: x.exp() * x.sin().long(), {"sin"}),
    "choice of elements": (lambda x: x.exp() + x.sin().topk(1).values, {"sin"}),
    "chain": (lambda x: x.cos() * (x.sin().tanh() > 0), {"sin", "tanh"}),
    "rounding alone": (lambda x: x.sin().exp() + x.cos(), set()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_leads_to_a_decision_is_found(name: str) -> None:
    function, expected = FUNCTIONS[name]
    graph = split(trace_joint([Function(function)], torch.randn(4, 3)), 0.0).forward
    positions = decisive_positions(graph)
    found = {
        node.target.__name__.partition(".")[0]
        for node in graph.module.graph.nodes
        if node.op == "call_function" and node.meta.get(JOINT_POSITION) in positions
    }
    assert found & {"sin", "cos", "exp", "tanh"} == expected


def test_the_gradient_of_relu_decides() -> None:
    joint = trace_joint([Function(lambda x: F.relu(x.sin()).exp())], torch.randn(4, 3, requires_grad=True))
    backward = split(joint, 0.0).backward
    assert backward is not None
    positions = decisive_positions(backward)
    names = {n.name for n in backward.module.graph.nodes if n.meta.get(JOINT_POSITION) in positions}
    assert {"sin", "relu"} <= names
    assert not any(name.startswith("cos") for name in names)
