"""Explanations: of models for a GPU that the machine lacks and for the CPU, and as text and HTML."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bench.models.gpt import blocks
from gpipe_fast import GPipe
from gpipe_fast.container import runner_of
from gpipe_fast.reports.explanation import (
    Explanation,
    FusedGroup,
    LeftGroup,
    ProgramExplanation,
    StageExplanation,
)
from tools.stages import SMALL, STAGES

pytest.importorskip("triton")

FUSED = FusedGroup(
    ("add", "native_layer_norm"), ("region_0123abcd", "region_0123abcd"), ((1, 2), (3,)), 4_200_000
)
LEFT = [
    LeftGroup("cumsum", 2, (1, 3), 1_500_000, "kernels do not compute this operator"),
    LeftGroup("addmm", 3, (1, 2, 3), 0, "matrix product"),
    LeftGroup("mm", 1, (3,), 0, "matrix product"),
]


def stage(index: int = 0, first: int = 1, note: str = "") -> StageExplanation:
    program = ProgramExplanation("forward", 4, 10_000_000, 7_500_000, 12, 9, (FUSED,), tuple(LEFT))
    offset = first - 1
    moved = replace(
        program,
        fused=tuple(
            replace(g, layers=tuple(tuple(n + offset for n in place) for place in g.layers))
            for g in program.fused
        ),
        left=tuple(replace(g, layers=tuple(n + offset for n in g.layers)) for g in program.left),
    )
    return StageExplanation(index, ("Linear", "Block", "Block"), first, f"cuda:{index}", note, (moved,))


HEADLINE = "What is fused on cuda, 4 micro-batches; bytes are for one micro-batch"


def explanation(*stages: StageExplanation, device: str = "cuda", notes: tuple[str, ...] = ()) -> Explanation:
    return Explanation(device, "4 micro-batches", notes, stages)


def test_a_stage_is_a_summary_and_two_tables() -> None:
    text = str(explanation(stage(), notes=("a note",)))
    assert text.startswith(f"{HEADLINE}\n\na note\n\nStage 0: layers 1-3 (Linear, 2 x Block)\n\n")
    summary = next(line for line in text.splitlines() if line.startswith("forward "))
    assert summary.split() == ["forward", "4", "10.0", "7.5", "25%", "12", "9"]
    assert "Forward: fused" in text
    assert "2 x region_0123abcd" in text
    assert "2 x in layers 1-3" in text
    assert "2 x cumsum" in text
    assert "layers 1, 3" in text


def test_stages_that_differ_in_their_place_alone_are_one() -> None:
    text = str(explanation(stage(), stage(1, first=4), stage(2, first=7, note="another note")))
    assert "Stages 0, 1, which are alike; layers are those of stage 0: layers 1-3" in text
    assert "Stage 2: layers 7-9" in text
    assert text.count("Forward: fused") == 2


def test_html_is_escaped() -> None:
    html = explanation(stage(note="<note>"), device="a < b", notes=("x & y",))._repr_html_()
    assert "on a &lt; b, 4 micro-batches" in html
    assert "<p>x &amp; y</p>" in html
    assert "<p>&lt;note&gt;</p>" in html
    assert html.count("<table>") == html.count("</table>") == 3


def test_a_block_is_explained_in_both_directions() -> None:
    torch.manual_seed(0)
    layers, inputs = STAGES["GPT"].layers(SMALL), STAGES["GPT"].inputs(SMALL, torch.float32)
    model = GPipe(nn.Sequential(*layers), [len(layers)], chunks=2)
    (x,) = (torch.cat([t, t]).detach().requires_grad_(t.requires_grad) for t in inputs)
    with torch.autocast("cpu", torch.bfloat16):
        explanation = model.explain(x, device="cuda")
    assert json.loads(json.dumps(explanation.to_dict())) == explanation.to_dict()
    (found,) = explanation.stages
    assert not found.note
    assert [p.direction for p in found.programs] == [
        "forward", "backward with recompute", "forward", "backward",
    ]  # fmt: skip
    for program in found.programs:
        assert program.bytes_after < program.bytes_before
        assert program.launches_after < program.launches_before
        assert program.fused
        assert all(place == (0,) for group in program.fused for place in group.layers)
    left = {group.operator: group for group in found.programs[0].left}
    assert (left["addmm"].reason, left["addmm"].bytes) == ("matrix product", 0)
    assert left["_scaled_dot_product_cudnn_attention"].reason == "fused attention"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpoint", ["always", "except_attention", 0.1])
def test_a_gpu_recomputes_attention_only_if_asked(checkpoint: str | float, dtype: torch.dtype) -> None:
    """A tenth of the activations suffices to save what attention returns, which comes early on the ladder."""
    with torch.device("meta"):
        layers = nn.Sequential(*blocks(2, 1024, 16)).to(dtype)
    model = GPipe(layers, [2], devices=["cpu"], chunks=2, checkpoint=checkpoint)
    found = model.explain(torch.empty(8, 1024, 1024, dtype=dtype), device="cuda")
    _, backward = found.stages[0].programs
    counts = {group.operator: group.count for group in backward.left if "attention" in group.operator}
    forwards = [number for name, number in counts.items() if "backward" not in name]
    assert forwards == ([2] if checkpoint == "always" else [])
    assert sum(counts.values()) - sum(forwards) == 2


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
    planner = runner_of(model).planner
    state, plan, python = torch.get_rng_state(), planner.latest, dict(planner.plans)
    model.explain(x, device="cuda")
    model.explain(x)
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == ids
    for tensor, (value, gradient) in zip(tensors, values, strict=True):
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, value)
        assert gradient is None if tensor.grad is None else torch.equal(tensor.grad, gradient)
    assert torch.equal(torch.get_rng_state(), state)
    assert planner.latest is plan
    assert dict(planner.plans) == python
    model(x).sum().backward()  # and it still runs


def test_fuse_false_and_deterministic_algorithms_are_reasons() -> None:
    layers, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.zeros(4, 8)
    on_cpu = GPipe(layers, [2]).explain(x)
    assert not on_cpu.stages[0].programs
    assert "device='cuda'" in str(on_cpu)
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
