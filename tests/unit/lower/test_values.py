"""The values of a program: one for each node that owns memory, and one for each view of it."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from gpipe_fast.lower.program import ProgramIR, StorageKind
from gpipe_fast.lower.split import StageGraph, split
from gpipe_fast.lower.steps import Ref
from gpipe_fast.lower.values import GraphValues
from tests.stages import trace_joint
from tests.unit.fuse.graphs import Function

aten = torch.ops.aten


def transposed(x: Tensor) -> Tensor:
    y = x.sin()
    return torch.mm(y.t(), y) + torch.mm(y.t(), x)


def values_of() -> tuple[GraphValues, ProgramIR, StageGraph]:
    graph = split(trace_joint([Function(transposed)], torch.randn(2, 3)), 0.0).forward
    program = ProgramIR("forward")
    values = GraphValues(program, graph)
    values.add_placeholders()
    return values, program, graph


def node_of(graph: StageGraph, target: object) -> fx.Node:
    return graph.module.graph.find_nodes(op="call_function", target=target)[0]


def test_placeholders_are_inputs() -> None:
    _, program, _ = values_of()
    assert [(value.storage, value.sizes) for value in program.values] == [(StorageKind.INPUT, (2, 3))]
    assert [str(port) for port in program.inputs] == ["input[0]"]


def test_a_view_is_added_once() -> None:
    values, program, graph = values_of()
    sin, view = node_of(graph, aten.sin.default), node_of(graph, aten.t.default)
    base = values.add_base(sin, StorageKind.FRESH)
    assert values.of(sin) == base
    first = values.of(view)
    assert values.of(view) == first != base
    found = program.values[first]
    assert (found.storage, found.sizes, found.strides, found.index) == (
        StorageKind.VIEW, (3, 2), (1, 3), base,
    )  # fmt: skip
    assert values.argument([view, 2, (sin,)]) == [Ref(first), 2, [Ref(base)]]


def test_a_kept_layout_is_a_view_of_the_whole() -> None:
    values, program, _ = values_of()
    values.keep_traced_layout(0)
    values.keep_traced_layout(0)
    (view,) = program.values[1:]
    assert (view.storage, view.index, view.sizes) == (StorageKind.VIEW, 0, (2, 3))
