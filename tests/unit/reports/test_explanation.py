"""Explanations as text and HTML: equal stages are one, and layers and operators are counted in words."""

from __future__ import annotations

from dataclasses import replace

from gpipe_fast.reports.explanation import (
    Explanation,
    FusedGroup,
    LeftGroup,
    ProgramExplanation,
    StageExplanation,
)

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
