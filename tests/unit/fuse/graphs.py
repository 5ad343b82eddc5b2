"""Graphs for the tests of the pass: of functions with fake CUDA tensors, and of stages on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gpipe_fast.fuse.regions.grouping import regions_of
from gpipe_fast.fuse.regions.loops import Region
from gpipe_fast.lower.split import StageGraph, split
from gpipe_fast.torch_private.operators import is_view_op
from gpipe_fast.trace.joint_graph import JointGraph
from tests.stages import trace_joint

FP32 = torch.float32


def graph_of(
    function: Callable[..., Any],
    *shapes: Sequence[int],
    dtypes: Sequence[torch.dtype] = (),
    device: str = "cuda",
) -> fx.Graph:
    """Traces a function of tensors, fp32 by default, as stages are traced."""
    with FakeTensorMode():
        given = dtypes or [FP32] * len(shapes)
        inputs = [torch.empty(tuple(s), dtype=d, device=device) for s, d in zip(shapes, given, strict=True)]
        return make_fx(lambda *tensors: function(*tensors))(*inputs).graph


def regions_in(
    function: Callable[..., Any],
    *shapes: Sequence[int],
    dtypes: Sequence[torch.dtype] = (),
    device: str = "cuda",
    kept: Sequence[str] = (),
) -> list[Region]:
    """Returns the regions of a function's graph.

    Args:
        function: the function.
        shapes: the shapes of its arguments.
        dtypes: their dtypes.
        device: their device. The number of partial sums depends on a real GPU.
        kept: the names of nodes that regions must not compute.
    """
    graph = graph_of(function, *shapes, dtypes=dtypes, device=device)
    return regions_of(list(graph.nodes), lambda node: node.name in kept)


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
    return joint, parts.forward, parts.backward


def calls(graph: fx.Graph, target: Any = None) -> list[fx.Node]:
    """Returns the calls of a graph, in order; those of one operator if it is given."""
    nodes = graph.nodes if target is None else graph.find_nodes(op="call_function", target=target)
    return [node for node in nodes if node.op == "call_function"]


def operators_in(graph: fx.Graph) -> list[str]:
    """Returns the operators that a graph calls, in order, without views and launches."""
    called = [n.target for n in calls(graph) if isinstance(n.target, OpOverload)]
    names = {target: target._schema.name.removeprefix("aten::") for target in called}
    return [names[t] for t in called if not is_view_op(t) and t is not torch.ops.aten._unsafe_view.default]


def fragment_of(function: Callable[..., Any], *inputs: fx.Node) -> fx.Graph:
    """Returns a fragment of plain operators for inputs of a graph."""
    with FakeTensorMode():
        values = [n.meta["val"] for n in inputs]
        fakes = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]
        return make_fx(lambda *tensors: tuple(function(*tensors)))(*fakes).graph
