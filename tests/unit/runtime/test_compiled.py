"""Compiled stages: their boundaries, the gradients that they take, and their programs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpipe_fast.layers.structure import tuple_structure
from gpipe_fast.runtime.compile import Compiler
from gpipe_fast.runtime.compiled import GradientLayoutHistory
from gpipe_fast.runtime.stage import BoundarySpec
from gpipe_fast.trace.gradient_layouts import GradientLayout
from tests.unit.runtime.test_compile import compile_stages, spec, stages_of


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
    ((first, _),) = compiler.compile(stages, [BoundarySpec((spec(8, 4),))], GradientLayoutHistory(1))
    assert len(first.outputs.tensors) == 2
    assert first.outputs.structure == tuple_structure(2)
    assert first.traced.joint.ports.differentiable_outputs() == {0}
    backward = first.traced.lower(0.0).backward
    assert backward is not None
    assert sorted(backward.gradients) == [0, 1]


def test_the_latest_layouts_of_gradients_are_remembered() -> None:
    history = GradientLayoutHistory(1)
    (stage,) = compile_stages(Compiler(), stages_of(nn.Linear(4, 4)))
    strides = history.record(stage.segment_key, [torch.empty(4, 8).t(), None])
    assert strides == {0: GradientLayout((1, 8))} == history.lookup(stage.segment_key)
