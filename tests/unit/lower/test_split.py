"""The joint graph split by every policy: saved, recomputed, and omitted values."""

from __future__ import annotations

import operator
from collections import Counter

import pytest
import torch
from torch import nn

from bench.models.gpt import blocks
from gpipe_fast.lower.checkpoint import SAVE_ATTENTION
from gpipe_fast.lower.split import SavedTensor, StageGraph, split
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole
from tests.stages import input_values, run_graph, saved, trace_joint

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
    assert parts.saved == ()
    assert parts.forward_saving is parts.forward
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
    assert [(tensor.shape, tensor.layer) for tensor in parts.saved] == [
        shape_and_layer for layer in (0, 1) for shape_and_layer in (((2, 2, 8, 8), layer), ((2, 2, 8), layer))
    ]
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
    assert [(tensor.layer, len(tensor.shape)) for tensor in parts.saved] == [(0, 4), (1, 4), (1, 3)]


def test_without_attention_everything_is_recomputed() -> None:
    joint = trace_joint(mlp(), INPUT.clone().requires_grad_())
    parts = split(joint, SAVE_ATTENTION)
    assert parts.saved == ()
    assert parts.backward is not None
    assert parts.backward.name == "backward_recompute"
    assert count_calls(parts.backward) == count_calls(split(joint, 0.0).backward)


def test_no_recompute_saves_the_values_that_the_backward_reads() -> None:
    parts = split(trace_joint(mlp(), INPUT.clone().requires_grad_()), 1.0)
    assert parts.saved == (
        SavedTensor("relu", (4, 5), torch.float32, 80, 1),
        SavedTensor("tanh", (4, 5), torch.float32, 80, 3),
    )
    assert count_calls(parts.backward)[aten.addmm.default] == 0
    assert count_calls(parts.forward_saving) == count_calls(parts.forward)


@pytest.mark.smoke
def test_saved_describes_the_saved_outputs_of_the_forward() -> None:
    x = torch.randn(2, 8, 16, requires_grad=True)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)]
    joint = trace_joint(layers, x)
    parts = split(joint, 0.6)
    kept = saved(run_graph(parts.forward_saving, input_values(layers, joint, x)))
    assert [port.index for port in kept] == list(range(len(parts.saved))) != []
    for description, value in zip(parts.saved, kept.values(), strict=True):
        assert (description.shape, description.dtype) == (tuple(value.shape), value.dtype)
        assert description.bytes == value.numel() * value.element_size()
        assert description.layer == 0


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
