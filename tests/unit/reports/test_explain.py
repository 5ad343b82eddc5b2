"""Explanations for a GPU that the machine lacks, and for the CPU."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, replicate
from gpipe_fast.explanation import Explanation, ProgramExplanation, StageExplanation
from gpipe_fast.fuse.casts import hoist_parameter_casts
from gpipe_fast.fuse.fuse import fuse_alike
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.split import split
from gpipe_fast.lower.work import count
from gpipe_fast.trace.absent_device import backward_without_gpu
from gpipe_fast.trace.joint_graph import JointGraph
from gpipe_fast.trace.trace import TraceContext, trace
from tools.stages import PRECISIONS, SMALL, STAGES

pytest.importorskip("triton")


def stage(name: str, precision: str) -> tuple[list[nn.Module], list[Tensor]]:
    torch.manual_seed(0)
    dtype = PRECISIONS[precision].parameters
    return [layer.to(dtype) for layer in STAGES[name].layers(SMALL)], STAGES[name].inputs(SMALL, dtype)


def explained(name: str, precision: str, **options: Any) -> Explanation:
    """Explains a stage with two micro-batches of the benchmark's size."""
    layers, inputs = stage(name, precision)
    whole = [torch.cat([t, t]).detach().requires_grad_(t.requires_grad) for t in inputs if len(t) > 1]
    parts = [*whole, *(replicate(t) for t in inputs if len(t) == 1)]
    model = GPipe(nn.Sequential(*layers), [len(layers)], chunks=2, **options)
    dtype = PRECISIONS[precision].autocast
    with torch.autocast("cpu", dtype, dtype is not None):
        return model.explain(parts[0] if len(parts) == 1 else tuple(parts), device="cuda")


def programs(explanation: Explanation) -> dict[str, ProgramExplanation]:
    (found,) = explanation.stages
    return {program.direction: program for program in reversed(found.programs)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["GPT", "Llama"])
def test_numbers_equal_those_of_the_graphs(name: str, precision: str) -> None:
    """Counts the programs as `python -m tools fusion` does, for the same graph."""
    layers, inputs = stage(name, precision)
    device = torch.device("cuda:0")
    example = [t.to("meta").detach().requires_grad_(t.requires_grad) for t in inputs]
    dtype = PRECISIONS[precision].autocast
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", dtype is not None)
    torch.set_autocast_dtype("cuda", dtype or before)
    try:
        joint = trace(layers, example, trace_context=TraceContext(device=device, is_absent=True))
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
    assert isinstance(joint, JointGraph)
    plain, hoisted = (split(graph, FULL_RECOMPUTE) for graph in (joint, hoist_parameter_casts(joint)))
    assert plain.backward is not None
    assert hoisted.backward is not None
    with backward_without_gpu():
        fused = fuse_alike(hoisted.forward, hoisted.backward, lambda _: None, lambda _: False)
    found = programs(explained(name, precision))
    graphs = zip((plain.forward, plain.backward), fused, strict=True)
    for program, (graph, after) in zip(("forward", "backward with recompute"), graphs, strict=True):
        expected = [count(lower(g)) for g in (graph, after.graph)]
        got = found[program]
        assert [w.moved for w in expected] == [got.bytes_before, got.bytes_after]
        assert [w.launches for w in expected] == [got.launches_before, got.launches_after]


def test_a_block_is_explained_in_both_directions() -> None:
    explanation = explained("GPT", "autocast")
    found = programs(explanation)
    assert [p.direction for p in explanation.stages[0].programs] == [
        "forward", "backward with recompute", "forward", "backward",
    ]  # fmt: skip
    for program in found.values():
        assert program.microbatches == 1
        assert program.bytes_after < program.bytes_before
        assert program.launches_after < program.launches_before
        assert program.fused
        assert all(place == (0,) for group in program.fused for place in group.layers)
    left = {group.operator: group for group in found["forward"].left}
    assert left["addmm"].reason == "matrix product"
    assert left["addmm"].bytes == 0
    assert left["_scaled_dot_product_cudnn_attention"].reason == "fused attention"
    assert not explanation.stages[0].note


def test_attention_in_float32_is_memory_efficient() -> None:
    names = {group.operator for group in programs(explained("GPT", "fp32"))["forward"].left}
    assert "_scaled_dot_product_efficient_attention" in names


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["ViT", "ResNet", "GPT-2, attention dropout"])
@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_other_models_are_explained(name: str, precision: str) -> None:
    found = programs(explained(name, precision))
    assert found["backward with recompute"].bytes_after < found["backward with recompute"].bytes_before


def test_in_inference_only_the_forward_is_explained() -> None:
    model = GPipe(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)), [3], chunks=2)
    with torch.no_grad():
        found = model.explain(torch.zeros(4, 8), device="cuda")
    (program,) = found.stages[0].programs
    assert (program.direction, program.microbatches) == ("forward", 2)
    assert "without gradients" in str(found)


def test_the_model_is_unchanged() -> None:
    torch.manual_seed(0)
    model = GPipe(nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.BatchNorm1d(8)), [1, 2], chunks=4)
    x = torch.randn(8, 8)
    model(x).sum().backward()
    tensors = [*model.parameters(), *model.buffers()]
    ids, values = [id(t) for t in tensors], copy.deepcopy([(t.detach(), t.grad) for t in tensors])
    state, plan, python = torch.get_rng_state(), model._planner.latest, dict(model._planner._plans)
    model.explain(x, device="cuda")
    model.explain(x)
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == ids
    for tensor, (value, gradient) in zip(tensors, values, strict=True):
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, value)
        assert gradient is None if tensor.grad is None else torch.equal(tensor.grad, gradient)
    assert torch.equal(torch.get_rng_state(), state)
    assert model._planner.latest is plan
    assert dict(model._planner._plans) == python
    model(x).sum().backward()  # and it still runs


def test_nothing_is_fused_on_the_cpu() -> None:
    found = GPipe(nn.Sequential(nn.Linear(4, 4)), [1], chunks=1).explain(torch.zeros(2, 4))
    assert not found.stages[0].programs
    assert "device='cuda'" in str(found)


def test_fuse_false_and_deterministic_algorithms_are_reasons() -> None:
    layers, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.zeros(4, 8)
    found = GPipe(layers, [2], fuse=False).explain(x, device="cuda").stages[0]
    assert found.note == "Nothing is fused, because the model has fuse=False."
    assert found.programs[0].launches_before == found.programs[0].launches_after
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic" in GPipe(layers, [2]).explain(x, device="cuda").stages[0].note
    finally:
        torch.use_deterministic_algorithms(False)
    model = GPipe(layers, [2], backend="eager")
    assert "backend='eager'" in model.explain(x, device="cuda").stages[0].note
    assert "save nothing" not in model.explain(x, device="cuda").stages[0].note
    model.checkpoint = 0.5
    assert "layers in Python save nothing" in model.explain(x, device="cuda").stages[0].note


class Branches(nn.Module):
    """Cannot be traced, because its result depends on the elements of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_a_layer_in_python_is_named_with_the_reason() -> None:
    model = GPipe(nn.Sequential(nn.Linear(8, 8), Branches(), nn.Linear(8, 8)), [2, 1], chunks=2)
    first, second = model.explain(torch.zeros(4, 8), device="cuda").stages
    assert first.note.startswith("Stage 0, layer 1 (Branches) runs in Python: ")
    assert "stage 0 runs in Python" in second.note


def test_dicts_and_html() -> None:
    found = explained("GPT", "bf16")
    again = json.loads(json.dumps(found.to_dict()))
    assert again == found.to_dict()
    assert again["stages"][0]["programs"][0]["direction"] == "forward"
    kind = type("Block<b>", (nn.Linear,), {})
    html = GPipe(nn.Sequential(kind(4, 4)), [1]).explain(torch.zeros(2, 4), device="cuda")._repr_html_()
    assert "Block&lt;b&gt;" in html
    assert "Block<b>" not in html


def test_equal_stages_are_printed_once() -> None:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(4)]
    model = GPipe(nn.Sequential(*layers), [2, 2], chunks=2)
    text = str(model.explain(torch.zeros(4, 8, requires_grad=True), device="cuda"))
    assert "Stages 0, 1, which are alike" in text
    assert max(map(len, text.splitlines())) <= 180


def test_types() -> None:
    (found,) = GPipe(nn.Sequential(nn.Linear(4, 4)), [1]).explain(torch.zeros(2, 4)).stages
    assert isinstance(found, StageExplanation)


@pytest.mark.parametrize("device", ["cpu:7x", "meta", "cpu"])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match="device"):
        GPipe(nn.Sequential(nn.Linear(4, 4)), [1]).explain(torch.zeros(2, 4), device=device)
