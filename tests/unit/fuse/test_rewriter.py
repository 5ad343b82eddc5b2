"""The rewriter replaces nodes, and keeps a stage's graph functional, free of cycles and in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from gpipe_fast.fuse.rewriter import Rewriter, moved_bytes
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.split import JOINT_POSITION, StageGraph, split
from gpipe_fast.trace.joint_graph import GraphRole
from tests.stages import input_values, run_graph, saved, trace_joint, unequal
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


def run(graph: StageGraph, x: Tensor) -> Tensor:
    result: Tensor
    (result,) = graph.module(x)
    return result


def is_in_order(graph: fx.Graph) -> bool:
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        if not seen.issuperset(node.all_input_nodes):
            return False
        seen.add(node)
    return str(node.op) == "output"


def test_without_replacements_the_graph_stays() -> None:
    for graph in stage_of(LAYERS, torch.randn(ROWS, COLS), 0.5)[1:]:
        same = Rewriter(graph).finish()
        assert str(same.module.graph) == str(graph.module.graph)
        assert [(p, n.name) for p, n in same.inputs] == [(p, n.name) for p, n in graph.inputs]
        assert [(p, n.name) for p, n in same.outputs] == [(p, n.name) for p, n in graph.outputs]
        assert {n for _, n in same.outputs} <= set(same.module.graph.nodes)
        positions = [[n.meta.get(JOINT_POSITION) for n in each.module.graph.nodes] for each in (same, graph)]
        assert positions[0] == positions[1]


def test_a_replacement_computes_the_outputs_and_leaves_no_unused_nodes() -> None:
    graph = forward_of(lambda x: (x.exp().sin() + 1).tanh())
    before = str(graph.module.graph)
    rewriter = Rewriter(graph)
    x, add = rewriter.graph.find_nodes(op="placeholder")[0], only(rewriter.graph, aten.add.Tensor)
    replace(rewriter, [x], [add], lambda x: [x.cos()])
    found = rewriter.finish()
    assert targets(found) == [aten.cos.default, aten.tanh.default]
    x_value = torch.randn(ROWS, COLS)
    assert torch.equal(run(found, x_value), x_value.cos().tanh())
    assert str(graph.module.graph) == before, "the given graph is unchanged"


def test_nodes_that_others_use_stay() -> None:
    rewriter = Rewriter(forward_of(lambda x: (lambda e: e.sin() + e)(x.exp())))
    (x,), (exp, sine, _) = rewriter.graph.find_nodes(op="placeholder"), calls(rewriter.graph)
    assert rewriter.between([x], [sine]) == {exp, sine}
    assert rewriter.between([exp], [sine]) == {sine}
    replace(rewriter, [x], [sine], lambda x: [x.cos()])
    assert rewriter.alive(exp)
    assert not rewriter.alive(sine)
    assert targets(rewriter.finish()) == [aten.exp.default, aten.cos.default, aten.add.Tensor]


def test_inputs_that_are_not_used_any_more_stay() -> None:
    rewriter = Rewriter(stage_of([nn.Linear(COLS, COLS)], torch.randn(ROWS, COLS))[1])
    output = only(rewriter.graph, aten.addmm.default)
    x = next(n for n in rewriter.graph.nodes if n.op == "placeholder" and n.meta["val"].shape == (ROWS, COLS))
    replace(rewriter, [x], [output], lambda x: [x + 1])
    found = rewriter.finish()
    assert [port.role for port, _ in found.inputs].count(GraphRole.PARAMETER) == 2
    assert targets(found) == [aten.add.Tensor]


def test_a_fragment_may_return_an_input() -> None:
    rewriter = Rewriter(forward_of(lambda x: (x * 1).exp()))
    x, product = rewriter.graph.find_nodes(op="placeholder")[0], only(rewriter.graph, aten.mul.Tensor)
    replace(rewriter, [x], [product], lambda x: [x])
    assert targets(rewriter.finish()) == [aten.exp.default]


def test_a_replaced_node_is_the_input_of_a_later_replacement() -> None:
    rewriter = Rewriter(forward_of(lambda x: x.exp().sin().tanh()))
    (x,) = rewriter.graph.find_nodes(op="placeholder")
    exp, sine, tanh = calls(rewriter.graph)
    copies = replace(rewriter, [x], [exp], lambda x: [x.cos() + 1])
    now = rewriter.current(exp)
    assert now.target is aten.add.Tensor
    assert now in copies.values()
    assert rewriter.current(sine) is sine
    replace(rewriter, [x], [now], lambda x: [x.cosh()])
    assert rewriter.current(exp).target is aten.cosh.default
    replace(rewriter, [rewriter.current(exp)], [tanh], lambda h: [h.sigmoid()])
    found = rewriter.finish()
    assert targets(found) == [aten.cosh.default, aten.sigmoid.default]
    assert is_in_order(found.module.graph)


def test_new_nodes_take_over_their_place_in_the_model() -> None:
    rewriter = Rewriter(forward_of(lambda x: x.exp().sin()))
    (x,), (exp, sine) = rewriter.graph.find_nodes(op="placeholder"), calls(rewriter.graph)
    copies = replace(rewriter, [x], [exp, sine], lambda x: [x.cos(), x.cosh()])
    by_target = {n.target: n for n in copies.values()}
    for target, old in ((aten.cos.default, exp), (aten.cosh.default, sine)):
        assert by_target[target].meta[JOINT_POSITION] == old.meta[JOINT_POSITION]
        assert by_target[target].meta.get("custom") == old.meta.get("custom")
        assert by_target[target].meta["val"].shape == (ROWS, COLS)
    assert exp.meta[JOINT_POSITION] != sine.meta[JOINT_POSITION]


def cycles(function: Callable[[Tensor], Tensor], inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    rewriter = Rewriter(forward_of(function))
    (x,) = rewriter.graph.find_nodes(op="placeholder")
    given = [x, *(only(rewriter.graph, target) for target in inputs)]
    made = [only(rewriter.graph, target) for target in outputs]
    return rewriter.makes_cycle(given, made, rewriter.between(given, made))


def test_an_input_that_needs_an_output_makes_a_cycle() -> None:
    def loop(x: Tensor) -> Tensor:
        return x.exp().sin().tanh()

    exp, sin, tanh = (getattr(aten, name).default for name in ("exp", "sin", "tanh"))
    assert cycles(loop, [sin], [exp, tanh])
    assert not cycles(loop, [sin], [tanh])
    assert not cycles(loop, [], [exp, tanh])
    assert not cycles(loop, [exp], [sin, tanh])


def test_a_cycle_through_an_earlier_replacement_is_found() -> None:
    """The first replacement makes cosh depend on exp; exp and a user of cosh are then no match."""
    rewriter = Rewriter(forward_of(lambda x: x.exp().sin() + x.cosh().tanh()))
    (x,) = rewriter.graph.find_nodes(op="placeholder")
    exp, sine, cosh, tanh = (
        only(rewriter.graph, getattr(aten, name).default) for name in ("exp", "sin", "cosh", "tanh")
    )
    assert not rewriter.makes_cycle([x, cosh], [exp, tanh], {exp, tanh})
    replace(rewriter, [x, exp], [sine, cosh], lambda x, e: [e + x, e - x])
    assert rewriter.makes_cycle([x, rewriter.current(cosh)], [exp, tanh], {exp, tanh})


def test_the_order_stays_close_to_the_original() -> None:
    def function(x: Tensor) -> Tensor:
        a = x.exp()
        b = a.sin()
        c = b.tanh()
        d = c.sigmoid()
        return a + b + c + d

    rewriter = Rewriter(forward_of(function))
    (x,) = rewriter.graph.find_nodes(op="placeholder")
    exp, sine, tanh = calls(rewriter.graph)[:3]
    # The outputs straddle sin, which the new nodes need.
    replace(rewriter, [x, sine], [tanh], lambda x, s: [(x * s).cosh()])
    found = rewriter.finish()
    names = [str(t).split(".")[1] for t in targets(found)]
    assert names == ["exp", "sin", "mul", "cosh", "sigmoid", "add", "add", "add"]
    assert exp.target is calls(found.module.graph)[0].target


def test_each_output_is_computed_in_the_place_of_its_node() -> None:
    """The launch is where the first output was, an operator after it where the second one was."""
    rewriter = Rewriter(forward_of(lambda x: (lambda e: e.tanh() + e.sinh() * e.sigmoid())(x.exp())))
    (exp,), (sigmoid,) = (calls(rewriter.graph, t) for t in (aten.exp.default, aten.sigmoid.default))
    (x,) = rewriter.graph.find_nodes(op="placeholder")
    replace(rewriter, [x], [exp, sigmoid], lambda x: [x.cos(), x.cosh()])
    names = [str(t).split(".")[1] for t in targets(rewriter.finish())]
    assert names == ["cos", "tanh", "sinh", "cosh", "mul", "add"]


def test_a_fragment_waits_for_late_inputs_and_so_do_its_users() -> None:
    rewriter = Rewriter(forward_of(lambda x: x.exp().sin() + x.cosh().tanh()))
    (x,) = rewriter.graph.find_nodes(op="placeholder")
    exp, cosh = (only(rewriter.graph, getattr(aten, name).default) for name in ("exp", "cosh"))
    replace(rewriter, [x, cosh], [exp], lambda x, c: [x * c])
    found = rewriter.finish()
    assert is_in_order(found.module.graph)
    names = [str(t).split(".")[1] for t in targets(found)]
    assert names == ["cosh", "mul", "sin", "tanh", "add"]


def test_bytes_count_what_becomes_superfluous() -> None:
    size = 4 * ROWS * COLS
    rewriter = Rewriter(forward_of(lambda x: x.exp().sin().view(COLS, ROWS).tanh() + x.cosh()[0, 0]))
    (x,) = rewriter.graph.find_nodes(op="placeholder")
    tanh = only(rewriter.graph, aten.tanh.default)
    inner = rewriter.between([x], [tanh])
    fragment = fragment_of(lambda x: [x.cos().view(COLS, ROWS)], x)
    # exp, sin and tanh each read and write a tensor; the view is free.
    assert rewriter.bytes_before_and_after([tanh], inner, fragment) == (6 * size, 2 * size)


def test_bytes_of_inner_nodes_with_other_users_are_not_saved() -> None:
    size = 4 * ROWS * COLS
    rewriter = Rewriter(forward_of(lambda x: (lambda e: e.sin().tanh() + e)(x.exp())))
    (x,) = rewriter.graph.find_nodes(op="placeholder")
    exp, tanh = (only(rewriter.graph, getattr(aten, name).default) for name in ("exp", "tanh"))
    fragment = fragment_of(lambda x: [x.cos()], x)
    assert rewriter.bytes_before_and_after([tanh], rewriter.between([x], [tanh]), fragment)[0] == 4 * size
    both = rewriter.between([x], [exp, tanh])
    assert rewriter.bytes_before_and_after([exp, tanh], both, fragment)[0] == 6 * size


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


def test_the_reference_computes_the_replaced_nodes() -> None:
    rewriter = Rewriter(forward_of(lambda x: (x.exp() * 2).sin() + x.exp()))
    (x,) = rewriter.graph.find_nodes(op="placeholder")
    sine = only(rewriter.graph, aten.sin.default)
    product = only(rewriter.graph, aten.mul.Tensor)
    graph, given = rewriter.reference([x], [product, sine])
    assert given == [x]
    module = fx.GraphModule(nn.Module(), graph)
    value = torch.randn(ROWS, COLS)
    assert [*map(torch.equal, module(value), [value.exp() * 2, (value.exp() * 2).sin()])] == [True] * 2
    assert len(calls(graph)) == 3


def test_the_reference_has_placeholders_for_what_else_its_nodes_read() -> None:
    rewriter = Rewriter(forward_of(lambda x: (x.exp().t() * x.cosh().t()).sin() + x.t()))
    exp, cosh, sine = (only(rewriter.graph, getattr(aten, name).default) for name in ("exp", "cosh", "sin"))
    product = only(rewriter.graph, aten.mul.Tensor)
    graph, given = rewriter.reference([exp], [sine], within={product, sine})
    assert given == [exp, cosh], "views are copied, other nodes outside are not"
    assert [n.target for n in calls(graph)].count(aten.t.default) == 2
    values = torch.rand(ROWS, COLS), torch.rand(ROWS, COLS)
    (found,) = fx.GraphModule(nn.Module(), graph)(*values)
    assert torch.equal(found, (values[0].t() * values[1].t()).sin())
    every, _ = rewriter.reference([exp], [sine])
    assert len(calls(every, aten.cosh.default)) == 1


def test_the_inputs_of_a_reference_are_placeholders_even_if_no_node_reads_them() -> None:
    rewriter = Rewriter(forward_of(lambda x: x.exp().sin() + x.cosh()))
    (x,) = rewriter.graph.find_nodes(op="placeholder")
    exp, cosh, sine = (only(rewriter.graph, getattr(aten, name).default) for name in ("exp", "cosh", "sin"))
    graph, given = rewriter.reference([cosh, x], [sine], within={sine})
    assert given == [cosh, x, exp]
    assert len(graph.find_nodes(op="placeholder")) == 3
    assert [n.target for n in calls(graph)] == [aten.sin.default]


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_late_nodes_depend_on_a_boundary_gradient(fraction: float) -> None:
    _, _, graph = stage_of([nn.Tanh(), nn.Sigmoid()], torch.randn(ROWS, COLS), fraction)
    rewriter = Rewriter(graph)
    late = {n.target for n in rewriter.late_nodes() if n.op == "call_function"}
    late -= {aten.detach.default}
    early = {n.target for n in calls(rewriter.graph)} - late - {aten.detach.default}
    assert late == {aten.tanh_backward.default, aten.sigmoid_backward.default}
    assert early == ({aten.tanh.default, aten.sigmoid.default} if fraction == 0.0 else set())
    forward = Rewriter(stage_of([nn.Tanh()], torch.randn(ROWS, COLS))[1])
    assert forward.late_nodes() == set()


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_the_parts_of_a_backward_are_kept(fraction: float) -> None:
    """What needs no boundary gradient still runs before it arrives, and results still come first."""
    x = torch.randn(ROWS, COLS)
    joint, forward, graph = stage_of(LAYERS, x, fraction)
    rewriter = Rewriter(graph)
    recomputed = calls(rewriter.graph, aten.tanh.default)
    for node in recomputed:
        replace(rewriter, [node.args[0]], [node], lambda h: [(2 * h).sigmoid() * 2 - 1])  # type: ignore[list-item]
    (gradient,) = calls(rewriter.graph, aten.tanh_backward.default)
    inputs = gradient.all_input_nodes
    replace(rewriter, inputs, [gradient], lambda g, y: [g - g * y * y])
    found = rewriter.finish()
    assert is_in_order(found.module.graph)
    before, after = lower(graph), lower(found)
    assert len(recomputed) == (fraction == 0.0)
    assert after.parts[0] == before.parts[0] + 3 * len(recomputed)
    assert after.parts[1] - after.parts[0] == before.parts[1] - before.parts[0] + 2
    assert len(after.steps) - after.parts[1] == len(before.steps) - before.parts[1]
    values = input_values(LAYERS, joint, x)
    values |= saved(run_graph(forward, values))
    for port, value in run_graph(graph, values).items():
        torch.testing.assert_close(run_graph(found, values)[port], value)


def test_gradients_that_a_replacement_computes_together_keep_their_ports() -> None:
    x = torch.randn(ROWS, COLS)
    joint, _, graph = stage_of([nn.LayerNorm(COLS)], x)
    rewriter = Rewriter(graph)
    wanted = [n for n in rewriter.graph.output_node().all_input_nodes if n.op == "call_function"]
    inputs = rewriter.graph.find_nodes(op="placeholder")
    shapes = [tuple(n.meta["val"].shape) for n in wanted]
    scale = [float(i + 2) for i in range(len(wanted))]
    made = list(zip(shapes, scale, strict=True))
    replace(rewriter, inputs, wanted, lambda *t: [t[0].new_full(shape, factor) for shape, factor in made])
    values = input_values([nn.LayerNorm(COLS)], joint, x)
    by_name = {n.name: torch.full(*m) for n, m in zip(wanted, made, strict=True)}
    expected = {port: by_name[node.name] for port, node in graph.outputs}
    assert unequal(run_graph(rewriter.finish(), values), expected) == []
    assert len(by_name) == 3
