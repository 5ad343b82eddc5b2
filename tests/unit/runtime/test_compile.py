"""Compiling pipelines: equal stages share a trace, and each relevant change causes a new one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast.runtime.compile import Compiler, TooManyTraces
from gpipe_fast.runtime.compiled import CompiledStage
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TensorSpec
from gpipe_fast.trace.layer_states import LayerStates
from gpipe_fast.trace.traceability import Untraceable

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def block(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1))


def stages_of(*layers: nn.Module) -> list[Stage]:
    states = LayerStates()
    return [Stage([layer], i, CPU, states=states) for i, layer in enumerate(layers)]


def spec(*shape: int, requires_grad: bool = True) -> TensorSpec:
    return TensorSpec.of(torch.empty(shape), requires_grad)


def compile_stages(
    compiler: Compiler, stages: list[Stage], first: TensorSpec | None = None
) -> list[CompiledStage]:
    return compiler.compile(stages, [BoundarySpec((first or spec(8, 4),))])[0]


def test_equal_stages_are_traced_once() -> None:
    compiler = Compiler()
    result = compile_stages(compiler, stages_of(*(block() for _ in range(4))))
    assert compiler.num_traces == 1
    assert len({id(stage.traced) for stage in result}) == 1
    assert [stage.stage.first_layer for stage in result] == [0, 1, 2, 3]
    # Stages share their programs as data, but each stage has its own segment.
    assert len({id(stage.segment(0.0)) for stage in result}) == 4
    assert result[0].segment(0.0) is result[0].segment(0.0)


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_a_refusal_carries_stage_layer_and_reason() -> None:
    stages = [Stage([nn.Linear(4, 4)], 0, CPU), Stage([block(), block(), Branch()], 1, CPU)]
    with pytest.raises(Untraceable, match="Data-dependent") as refusal:
        compile_stages(Compiler(), stages)
    assert (refusal.value.stage, refusal.value.layer) == (1, 2)


def test_refusals_do_not_count_toward_the_limit_of_traces() -> None:
    """The cause may be the input, independently of the layers."""
    compiler, stages = Compiler(max_traces=1), stages_of(nn.Linear(4, 4))
    for batch in range(1, 4):
        with pytest.raises(Untraceable) as refusal:
            compile_stages(compiler, stages, spec(batch, 5))
        assert not isinstance(refusal.value, TooManyTraces)
    compile_stages(compiler, stages, spec(8, 4))
    with pytest.raises(TooManyTraces):
        compile_stages(compiler, stages, spec(2, 2, 4))
