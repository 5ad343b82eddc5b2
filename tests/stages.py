"""Helpers for tests of one stage: trace it, run its graphs in Python, run its programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from gpipe_fast._extension import Arena
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.split import SplitGraphs, StageGraph
from gpipe_fast.randomness.random import make_key
from gpipe_fast.trace.gradient_layouts import GradientLayouts
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole, JointGraph, buffers_of, parameters_of
from gpipe_fast.trace.trace import trace

CPU = torch.device("cpu")
Values = dict[GraphPort, Tensor]


def trace_joint(
    layers: Sequence[nn.Module], *inputs: Tensor, gradient_layouts: GradientLayouts = ()
) -> JointGraph:
    return trace(layers, inputs, gradient_layouts)


def input_values(layers: Sequence[nn.Module], joint: JointGraph, *inputs: Tensor, seed: int = 0) -> Values:
    """Returns a value for each input port; gradients of the outputs are random."""
    generator = torch.Generator().manual_seed(seed)
    values: Values = {GraphPort(GraphRole.KEY, 0): make_key(seed, 0)}
    values |= {GraphPort(GraphRole.INPUT, i): x.detach() for i, x in enumerate(inputs)}
    values |= {GraphPort(GraphRole.PARAMETER, i): p.detach() for i, p in enumerate(parameters_of(layers))}
    values |= {GraphPort(GraphRole.BUFFER, i): b.clone() for i, b in enumerate(buffers_of(layers))}
    for port, node in joint.inputs:
        if port.role is GraphRole.TANGENT:
            like = node.meta["val"]
            values[port] = torch.randn(tuple(like.shape), generator=generator, dtype=like.dtype)
    return values


def saved(results: Values) -> Values:
    return {port: value for port, value in results.items() if port.role is GraphRole.SAVED}


def saved_nodes(parts: SplitGraphs) -> list[fx.Node]:
    """Returns the nodes of the values that a forward saves for its backward."""
    return [node for port, node in parts.forward.outputs if port.role is GraphRole.SAVED]


def saved_shapes(parts: SplitGraphs) -> list[tuple[int, ...]]:
    return [tuple(node.meta["val"].shape) for node in saved_nodes(parts)]


def run_graph(graph: StageGraph, values: Mapping[GraphPort, Tensor]) -> Values:
    """Runs a graph with torch.fx and returns its results by port: the reference for a program."""
    with torch.no_grad():
        results = graph.module(*(values[port] for port, _ in graph.inputs))
    return {port: result for (port, _), result in zip(graph.outputs, results, strict=True)}


def run_graphs(parts: SplitGraphs, values: Values) -> tuple[Values, Values]:
    """Returns the results of the forward and of the backward."""
    forward = run_graph(parts.forward, values)
    assert parts.backward is not None
    return forward, run_graph(parts.backward, values | saved(forward))


class Runner:
    """One program of a stage, together with the accumulators of a mini-batch."""

    def __init__(self, graph: StageGraph, layers: Sequence[nn.Module], arena: Arena | None = None) -> None:
        self.program = lower(graph)
        self.native = self.program.build(arena or Arena(), CPU)
        parameters = [p.detach() for p in parameters_of(layers)]
        self.native.bind(parameters)
        self.accumulators: list[Tensor | None] = [None] * len(parameters)

    def __call__(self, values: Mapping[GraphPort, Tensor], first: bool = True) -> Values:
        """Runs the program; returns results by port, with parameter gradients summed over all runs so far."""
        inputs = [values[port] for port in self.program.inputs]
        outputs, self.accumulators = self.native.run(inputs, self.accumulators, first)
        results = dict(zip(self.program.outputs, outputs, strict=True))
        for index in self.program.gradients:
            gradient = self.accumulators[index]
            assert gradient is not None
            results[GraphPort(GraphRole.PARAMETER_GRADIENT, index)] = gradient
        return results


def unequal(ours: Values, expected: Values) -> list[str]:
    """Returns the ports whose values differ in a bit, in shape or in dtype."""
    assert ours.keys() == expected.keys()
    return [
        str(port)
        for port, value in expected.items()
        if ours[port].dtype != value.dtype or not torch.equal(ours[port], value)
    ]
