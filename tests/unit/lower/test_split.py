"""The joint graph split by every policy: saved, recomputed, and omitted values."""

from __future__ import annotations

import operator
from collections import Counter

import pytest
import torch
from torch import nn

from bench.models.gpt import blocks
from gpipe_fast.lower.alias import source_of
from gpipe_fast.lower.checkpoint import SAVE_ATTENTION
from gpipe_fast.lower.split import StageGraph, split
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole, dequantized
from tests.quantized import HIDDEN, KINDS, WIDTH
from tests.quantized import blocks as quantized_blocks
from tests.stages import saved_nodes, saved_shapes, trace_joint

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten
INPUT = torch.linspace(-1, 1, 12).view(4, 3)


def mlp() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)]


def count_calls(graph: StageGraph | None) -> Counter[object]:
    assert graph is not None
    return Counter(n.target for n in graph.module.graph.nodes if n.op == "call_function")


def test_full_recompute_saves_nothing_and_omits_the_last_product() -> None:
    """No gradient needs the stage's own output."""
    parts = split(trace_joint(mlp(), INPUT.clone().requires_grad_()), 0.0)
    assert saved_shapes(parts) == []
    assert count_calls(parts.forward)[aten.addmm.default] == 3
    backward = count_calls(parts.backward)
    assert backward[aten.addmm.default] == 2
    assert backward[aten.mm.default] == 6  # a weight's and an input's gradient for each layer
    assert parts.backward is not None
    assert parts.backward.name == "backward_recompute"


def test_attention_is_saved_and_all_else_recomputed() -> None:
    x = torch.randn(2, 8, 16, requires_grad=True)
    joint = trace_joint([*blocks(2, 16, 2)], x)
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    everything, parts = split(joint, 0.0), split(joint, SAVE_ATTENTION)
    assert saved_shapes(parts) == 2 * [(2, 2, 8, 8), (2, 2, 8)]
    recomputed, without = count_calls(everything.backward), count_calls(parts.backward)
    assert recomputed.pop(attention) == 2
    assert attention not in without
    del recomputed[operator.getitem], without[operator.getitem]
    assert {t: n for t, n in recomputed.items() if "view" not in str(t)} == {
        t: n for t, n in without.items() if "view" not in str(t)
    }


def test_only_what_the_recompute_needs_of_attention_is_saved() -> None:
    """A frozen block has no backward, so nothing reads its logarithms of sums."""
    layers = [*blocks(2, 16, 2)]
    layers[0].requires_grad_(False)
    parts = split(trace_joint(layers, torch.randn(2, 8, 16)), SAVE_ATTENTION)
    assert [len(shape) for shape in saved_shapes(parts)] == [4, 4, 3]


def test_without_attention_everything_is_recomputed() -> None:
    joint = trace_joint(mlp(), INPUT.clone().requires_grad_())
    parts = split(joint, SAVE_ATTENTION)
    assert saved_shapes(parts) == []
    assert parts.backward is not None
    assert parts.backward.name == "backward_recompute"
    assert count_calls(parts.backward) == count_calls(split(joint, 0.0).backward)


def test_no_recompute_saves_the_values_that_the_backward_reads() -> None:
    parts = split(trace_joint(mlp(), INPUT.clone().requires_grad_()), 1.0)
    assert [node.name for node in saved_nodes(parts)] == ["relu", "tanh"]
    assert saved_shapes(parts) == [(4, 5), (4, 5)]
    assert count_calls(parts.backward)[aten.addmm.default] == 0
    assert count_calls(parts.forward)[aten.addmm.default] == 3


def test_frozen_parameters_get_no_gradient_and_cost_no_product() -> None:
    layers = mlp()
    for parameter in layers[0].parameters():
        parameter.requires_grad_(False)
    parts = split(trace_joint(layers, INPUT), 0.0)
    assert parts.backward is not None
    gradients = [port for port, _ in parts.backward.outputs]
    assert gradients == [GraphPort(GraphRole.PARAMETER_GRADIENT, i) for i in (2, 3, 4, 5)]
    assert count_calls(parts.backward)[aten.mm.default] == 3


def test_without_gradients_there_is_no_backward() -> None:
    layers = mlp()
    with torch.no_grad():
        parts = split(trace_joint(layers, INPUT), 0.0)
    assert parts.backward is None
    assert saved_shapes(parts) == []
    nn.Sequential(*layers).requires_grad_(False)
    assert split(trace_joint(layers, INPUT), 1.0).backward is None


@pytest.mark.parametrize("saved_fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("defers_weights", [False, True])
def test_weights_are_dequantized_just_before_each_use_and_never_saved(
    saved_fraction: float, defers_weights: bool
) -> None:
    joint = trace_joint([*quantized_blocks(KINDS["own"], 2)], torch.randn(2, WIDTH, requires_grad=True))
    parts = split(joint, saved_fraction, defers_weights=defers_weights)
    shapes = {(WIDTH, HIDDEN), (HIDDEN, WIDTH)}
    assert shapes.isdisjoint(saved_shapes(parts))
    names = {node.name for node in dequantized(joint)}
    assert names
    graphs = [each for each in (parts.forward, parts.backward, parts.weights) if each is not None]
    for graph in graphs:
        assert not any(
            tuple(n.node.meta["val"].shape) in shapes and n.port.role is GraphRole.HELD for n in graph.outputs
        )
        assert most_weights(graph, shapes) <= 1
    assert most_weights(parts.forward, shapes) == 1


def most_weights(graph: StageGraph, shapes: set[tuple[int, int]]) -> int:
    """Returns the most values of weights' shapes that are in memory at a time, without views."""
    nodes = list(graph.module.graph.nodes)
    given = {n.node for n in graph.inputs}
    last: dict[torch.fx.Node, int] = {}
    for position, node in enumerate(nodes):
        for argument in node.all_input_nodes:
            last[source_of(argument).base] = position
    live, most = set[torch.fx.Node](), 0
    for position, node in enumerate(nodes):
        value = node.meta.get("val")
        is_weight = isinstance(value, torch.Tensor) and tuple(value.shape) in shapes
        if is_weight and node not in given and source_of(node).base is node and position > 0:
            live.add(node)
        live = {each for each in live if last.get(each, 0) > position}
        most = max(most, len(live))
    return most


def test_a_recompute_leaves_out_what_no_adapters_gradient_needs() -> None:
    """Each of three layers has a frozen product, without a gradient of its weight, and two of LoRA."""
    joint = trace_joint([*quantized_blocks(KINDS["own"], 1)], torch.randn(2, WIDTH, requires_grad=True))
    parts = split(joint, 0.0)
    assert count_calls(parts.forward)[aten.mm.default] == 9
    # Without the last layer's frozen product, and the product with its second factor.
    recomputed = 7
    gradients = 3 + 3 * 4  # of inputs through frozen weights; of two factors and their inputs
    assert count_calls(parts.backward)[aten.mm.default] == recomputed + gradients
