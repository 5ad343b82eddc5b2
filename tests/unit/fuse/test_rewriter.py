"""The rewriter replaces nodes, and keeps a stage's graph functional, free of cycles and in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from gpipe_fast.fuse.rewriter import Rewriter, moved_bytes
from gpipe_fast.lower.split import JOINT_POSITION, StageGraph, split
from tests.stages import trace_joint
from tests.unit.fuse.graphs import Function, calls, fragment_of, graph_of, stage_of

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten
ROWS, COLS = 4, 8
LAYERS = [nn.Linear(COLS, COLS), nn.Tanh(), nn.LayerNorm(COLS), nn.Sigmoid(), nn.Linear(COLS, COLS)]


def forward_of(function: Callable[[Tensor], Tensor]) -> StageGraph:
    return split(trace_joint([Function(function)], torch.randn(ROWS, COLS)), 0.0).forward


def only(graph: fx.Graph, target: Any) -> fx.Node:
    (node,) = calls(graph, target)
    return node


def replace(
    rewriter: Rewriter, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node], function: Callable[..., Any]
) -> dict[fx.Node, fx.Node]:
    return rewriter.replace(inputs, outputs, fragment_of(function, *inputs))


def targets(graph: StageGraph) -> list[Any]:
    return [node.target for node in calls(graph.module.graph)]


def names_in(graph: StageGraph) -> list[str]:
    """Returns the names of operators, whose order is checked."""
    graph.module.graph.lint()
    return [str(target).split(".")[1] for target in targets(graph)]


def test_without_replacements_the_graph_stays() -> None:
    for graph in stage_of(LAYERS, torch.randn(ROWS, COLS), 0.5)[1:]:
        same = Rewriter(graph).finish()
        assert str(same.module.graph) == str(graph.module.graph)
        assert [(p, n.name) for p, n in same.inputs] == [(p, n.name) for p, n in graph.inputs]
        assert [(p, n.name) for p, n in same.outputs] == [(p, n.name) for p, n in graph.outputs]
        assert {n for _, n in same.outputs} <= set(same.module.graph.nodes)
        positions = [[n.meta.get(JOINT_POSITION) for n in each.module.graph.nodes] for each in (same, graph)]
        assert positions[0] == positions[1]


def test_a_replaced_node_is_the_input_of_a_later_replacement() -> None:
    graph = forward_of(lambda x: (x.exp() * 1).sin().tanh() + x.cosh())
    before, rewriter = str(graph.module.graph), Rewriter(graph)
    (x,) = rewriter.graph.find_nodes(op="placeholder")
    exp, product, sine, tanh, *_ = calls(rewriter.graph)
    assert rewriter.between([x], [sine]) == {exp, product, sine}
    assert rewriter.between([exp], [sine]) == {product, sine}
    replace(rewriter, [exp], [product], lambda e: [e])  # a fragment may return an input
    replace(rewriter, [x], [sine], lambda x: [x.cos() + 1])
    assert rewriter.current(sine).target is aten.add.Tensor
    replace(rewriter, [rewriter.current(sine)], [tanh], lambda h: [h.sigmoid()])
    found, x_value = rewriter.finish(), torch.randn(ROWS, COLS)
    assert names_in(found) == ["cos", "add", "sigmoid", "cosh", "add"]
    assert torch.equal(found.module(x_value)[0], (x_value.cos() + 1).sigmoid() + x_value.cosh())
    assert str(graph.module.graph) == before, "the given graph is unchanged"


def test_a_fragment_waits_for_late_inputs_and_so_do_its_users() -> None:
    rewriter = Rewriter(forward_of(lambda x: x.exp().sin() + x.cosh().tanh()))
    (x,) = rewriter.graph.find_nodes(op="placeholder")
    exp, _, cosh, *_ = calls(rewriter.graph)
    replace(rewriter, [x, cosh], [exp], lambda x, c: [x * c])
    assert names_in(rewriter.finish()) == ["cosh", "mul", "sin", "tanh", "add"]


def test_what_other_nodes_use_does_not_become_superfluous() -> None:
    rewriter = Rewriter(forward_of(lambda x: (lambda e: e.sin().view(COLS, ROWS).tanh() + e[0, 0])(x.exp())))
    (x,) = rewriter.graph.find_nodes(op="placeholder")
    exp, sine, tanh = (only(rewriter.graph, getattr(aten, name).default) for name in ("exp", "sin", "tanh"))
    (view,) = sine.users
    inner = rewriter.between([x], [tanh])
    assert rewriter.dead([tanh], inner) == {sine, view, tanh}
    assert rewriter.dead([exp, tanh], inner) == {exp, sine, view, tanh}


def test_moved_bytes() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        first, second = x.split(2, 1)
        norm = aten.native_layer_norm(x, [4], None, None, 0.1)
        return [x * x, x * y, first + second, *norm, x.t(), x.half(), x.detach()]

    found = {n.name: moved_bytes(n) for n in graph_of(function, (3, 4), (3, 4)).nodes}
    size = 4 * 3 * 4
    expected = {"mul": 2 * size, "mul_1": 3 * size, "native_layer_norm": 2 * size + 2 * 3 * 4}
    assert {name: found[name] for name in expected} == expected
    assert found["_to_copy"] == size + size // 2
    free = [name for name, moved in found.items() if not moved]
    assert {"split", "getitem", "getitem_1", "getitem_2", "t", "output"} <= {*free}
    assert found["add"] == size + size // 2, "the halves are different parts of one tensor"


def test_the_reference_computes_the_replaced_nodes_from_what_else_they_read() -> None:
    rewriter = Rewriter(forward_of(lambda x: (x.exp().t() * x.cosh().t()).sin() + x.t()))
    (x,) = rewriter.graph.find_nodes(op="placeholder")
    exp, cosh, sine = (only(rewriter.graph, getattr(aten, name).default) for name in ("exp", "cosh", "sin"))
    product = only(rewriter.graph, aten.mul.Tensor)
    graph, given = rewriter.reference([x, exp], [product, sine], within={product, sine})
    assert given == [x, exp, cosh], "views are copied, other nodes outside are not"
    assert [n.target for n in calls(graph)].count(aten.t.default) == 2
    unread, left, right = torch.rand(3, ROWS, COLS)
    found = fx.GraphModule(nn.Module(), graph)(unread, left, right)
    expected = left.t() * right.t()
    assert [*map(torch.equal, found, [expected, expected.sin()])] == [True] * 2
    every, _ = rewriter.reference([exp], [sine])
    assert len(calls(every, aten.cosh.default)) == 1
