"""Compiled stages: their boundaries, the gradients that they take, and their programs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpipe_fast.layers.structure import tuple_structure
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE, NO_RECOMPUTE
from gpipe_fast.runtime.compile import CompilationFailure, Compiler
from gpipe_fast.runtime.compiled import GradientLayoutHistory
from gpipe_fast.runtime.stage import BoundarySpec
from gpipe_fast.trace.joint_graph import GraphRole
from tests.unit.runtime.test_compile import block, compile_stages, spec, stages_of


def test_compiled_stages_have_boundary_specs() -> None:
    (first, second) = compile_stages(Compiler(), stages_of(nn.Linear(4, 6), nn.Linear(6, 2)))
    assert first.outputs == second.inputs == BoundarySpec((spec(8, 6),))
    assert second.outputs == BoundarySpec((spec(8, 2),))


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept, self.dropped = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.kept(x), self.dropped(x)


class TakesFirst(nn.Module):
    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return x[0] + 1


def test_an_unused_output_has_no_gradient() -> None:
    """Zeros instead of no gradient would give the output's parameters a gradient, or NaN."""
    compiler = Compiler()
    stages = stages_of(TwoOutputs(), TakesFirst())
    found = compiler.compile(stages, [BoundarySpec((spec(8, 4),))], GradientLayoutHistory(1))
    assert not isinstance(found, CompilationFailure)
    ((first, _),) = found
    assert len(first.outputs.tensors) == 2
    assert first.outputs.structure == tuple_structure(2)
    assert first.traced.joint.differentiable_outputs() == {0}
    backward = first.traced.lower(0.0).backward
    assert backward is not None
    assert sorted(backward.gradients) == [0, 1]


def test_each_saved_fraction_is_lowered_once() -> None:
    (stage,) = compile_stages(Compiler(), stages_of(block()))
    recompute, save = FULL_RECOMPUTE, NO_RECOMPUTE
    assert stage.traced.lower(recompute) is stage.traced.lower(recompute)
    saved = [
        [p for p in stage.traced.lower(fraction).forward.outputs if p.role is GraphRole.SAVED]
        for fraction in (recompute, save)
    ]
    assert saved[0] == []
    assert saved[1] != []


def test_a_stage_knows_what_its_programs_touch() -> None:
    (stage,) = compile_stages(Compiler(), stages_of(block()))
    layer = stage.stage.layers[0]
    assert [id(b) for b in stage.written_buffers()] == [id(b) for b in layer[1].buffers()]
    assert stage.parameters_with_gradients() == {0, 1, 2, 3}
    assert stage.draws
    assert stage.input_gradients() == {0: (4, 1)}
    assert stage.gradient_layouts({0: (1, 8)}) == ((0, (1, 8)),)
    before = stage.num_bytes()
    stage.segment(FULL_RECOMPUTE)
    assert stage.num_bytes() > before


def test_the_latest_layouts_of_gradients_are_remembered() -> None:
    history = GradientLayoutHistory(1)
    (stage,) = compile_stages(Compiler(), stages_of(nn.Linear(4, 4)))
    key = stage.segment_key
    strides = history.record(key, [torch.empty(4, 8).t(), None])
    assert strides == {0: (1, 8)} == history.lookup(key)
