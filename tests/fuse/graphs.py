"""Graphs for the tests of the pass: of functions with fake CUDA tensors, and of stages on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gpipe_fast.lower.split import StageGraph, split
from gpipe_fast.trace.trace import JointGraph
from tests.stages import trace_joint

FP32 = torch.float32


def graph_of(
    function: Callable[..., Any], *shapes: Sequence[int], dtypes: Sequence[torch.dtype] = ()
) -> fx.Graph:
    """Traces a function of CUDA tensors, fp32 by default, as stages are traced."""
    with FakeTensorMode():
        given = dtypes or [FP32] * len(shapes)
        inputs = [torch.empty(tuple(s), dtype=d, device="cuda") for s, d in zip(shapes, given, strict=True)]
        return make_fx(lambda *tensors: function(*tensors))(*inputs).graph


class Function(nn.Module):
    """A layer without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def stage_of(
    layers: Sequence[nn.Module], x: Tensor, fraction: float = 0.0
) -> tuple[JointGraph, StageGraph, StageGraph]:
    """Returns a stage's joint graph, its forward, and its backward."""
    joint = trace_joint(layers, x.requires_grad_())
    parts = split(joint, fraction)
    assert parts.backward is not None
    return joint, parts.forward_saving, parts.backward


def calls(graph: fx.Graph, target: Any = None) -> list[fx.Node]:
    """Returns the calls of a graph, in order; those of one operator if it is given."""
    nodes = graph.nodes if target is None else graph.find_nodes(op="call_function", target=target)
    return [node for node in nodes if node.op == "call_function"]


def fragment_of(function: Callable[..., Any], *inputs: fx.Node) -> fx.Graph:
    """Returns a fragment of plain operators for inputs of a graph."""
    with FakeTensorMode():
        values = [n.meta["val"] for n in inputs]
        fakes = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]
        return make_fx(lambda *tensors: tuple(function(*tensors)))(*fakes).graph
