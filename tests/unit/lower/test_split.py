"""The joint graph split by every policy: saved, recomputed, and omitted values."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from gpipe_fast.lower.split import SavedTensor, StageGraph, split
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole
from tests.stages import input_values, run_graph, run_graphs, saved, trace_joint, unequal

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten
INPUT = torch.linspace(-1, 1, 12).view(4, 3)


def mlp() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)]


def count_calls(graph: StageGraph | None) -> Counter[object]:
    assert graph is not None
    return Counter(n.target for n in graph.module.graph.nodes if n.op == "call_function")


def roles(graph: StageGraph | None) -> set[GraphRole]:
    assert graph is not None
    return {port.role for port, _ in graph.inputs}


def test_full_recompute_saves_nothing() -> None:
    parts = split(trace_joint(mlp(), INPUT.clone().requires_grad_()), 0.0)
    assert parts.saved == ()
    assert parts.forward_saving is parts.forward
    assert GraphRole.SAVED not in roles(parts.backward)


def test_full_recompute_omits_the_last_product() -> None:
    """No gradient needs the stage's own output."""
    parts = split(trace_joint(mlp(), INPUT.clone().requires_grad_()), 0.0)
    assert count_calls(parts.forward)[aten.addmm.default] == 3
    backward = count_calls(parts.backward)
    assert backward[aten.addmm.default] == 2
    assert backward[aten.mm.default] == 6  # a weight's and an input's gradient for each layer
    assert parts.backward is not None
    assert parts.backward.name == "backward_recompute"


def test_no_recompute_saves_the_values_that_the_backward_reads() -> None:
    parts = split(trace_joint(mlp(), INPUT.clone().requires_grad_()), 1.0)
    assert parts.saved == (
        SavedTensor("relu", (4, 5), torch.float32, 80, 1),
        SavedTensor("tanh", (4, 5), torch.float32, 80, 3),
    )
    assert count_calls(parts.backward)[aten.addmm.default] == 0
    assert count_calls(parts.forward_saving) == count_calls(parts.forward)


@pytest.mark.smoke
@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.6, 1.0])
def test_saved_describes_the_saved_outputs_of_the_forward(fraction: float) -> None:
    x = torch.randn(2, 8, 16, requires_grad=True)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)]
    joint = trace_joint(layers, x)
    parts = split(joint, fraction)
    kept = saved(run_graph(parts.forward_saving, input_values(layers, joint, x)))
    assert [port.index for port in kept] == list(range(len(parts.saved)))
    for description, value in zip(parts.saved, kept.values(), strict=True):
        assert (description.shape, description.dtype) == (tuple(value.shape), value.dtype)
        assert description.bytes == value.numel() * value.element_size()
        assert description.layer == 0


def test_a_larger_saved_fraction_saves_more_bytes() -> None:
    x = torch.randn(2, 8, 16, requires_grad=True)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
    joint = trace_joint(layers, x)
    bytes_saved = [sum(s.bytes for s in split(joint, b).saved) for b in (0.0, 0.3, 1.0)]
    assert bytes_saved[0] == 0
    assert bytes_saved == sorted(set(bytes_saved))


def test_views_are_saved_as_their_base() -> None:
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Unflatten(1, (2, 3)), nn.Linear(3, 3)]
    parts = split(trace_joint(layers, torch.randn(4, 6, requires_grad=True)), 1.0)
    assert [s.name for s in parts.saved] == ["tanh"]


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_all_saved_fractions_compute_the_same_values(fraction: float) -> None:
    layers = [*mlp(), nn.Dropout(0.3), nn.LayerNorm(2)]
    x = INPUT.clone().requires_grad_()
    joint = trace_joint(layers, x)
    values = input_values(layers, joint, x)
    expected = run_graphs(split(joint, 1.0), values)
    forward, backward = run_graphs(split(joint, fraction), values)
    for port in (p for p in forward if p.role is not GraphRole.SAVED):
        assert torch.equal(forward[port], expected[0][port])
    assert unequal(backward, expected[1]) == []


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
    assert parts.saved == ()
    assert parts.forward_saving is parts.forward
    nn.Sequential(*layers).requires_grad_(False)
    assert split(trace_joint(layers, INPUT), 1.0).backward is None


def test_buffers_are_outputs_of_the_forward_only() -> None:
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4)]
    parts = split(trace_joint(layers, INPUT.clone().requires_grad_()), 0.0)
    assert {port.role for port, _ in parts.forward.outputs} == {GraphRole.OUTPUT, GraphRole.BUFFER}
    assert parts.backward is not None
    assert {p.role for p, _ in parts.backward.outputs} == {
        GraphRole.PARAMETER_GRADIENT,
        GraphRole.INPUT_GRADIENT,
    }


def test_uses_of_a_tied_parameter_are_counted() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    parts = split(trace_joint([first, nn.Tanh(), second], INPUT.clone().requires_grad_()), 0.0)
    assert parts.backward is not None
    assert parts.backward.parameter_uses == {0: 2, 1: 1, 2: 1}  # the weight, both biases
