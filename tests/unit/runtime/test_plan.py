"""Plans: their schedule, what is known of their outputs, and whether they draw random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.schedule import fill_drain
from tests.internals import plan_of, stages_of
from tests.untraceable import without_warnings


def pipeline(*layers: nn.Module, chunks: int = 4) -> GPipe:
    return GPipe(nn.Sequential(*layers), [1] * len(layers), chunks=chunks, checkpoint="never")


class Branch(nn.Module):
    """A layer that runs in Python."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 1e9 else -x


def test_an_inference_has_forwards_alone() -> None:
    pipe = pipeline(nn.Linear(6, 6), nn.Linear(6, 4))
    with torch.no_grad():
        assert plan_of(pipe, torch.randn(8, 6)).schedule.csv() == fill_drain(2, 4, backward=False).csv()
    training = plan_of(pipe, torch.randn(8, 6)).schedule
    assert (training.num_stages, training.num_microbatches) == (2, 4)
    assert training.backward_part()


@pytest.mark.parametrize(
    ("layer", "draws"),
    [(nn.Dropout(0.5), True), (nn.Dropout(0.0), False), (nn.ReLU(), False), (Branch(), None)],
)
def test_random_operators_are_known_unless_a_layer_runs_in_python(
    layer: nn.Module, draws: bool | None
) -> None:
    with without_warnings():
        assert plan_of(pipeline(nn.Linear(6, 6), layer), torch.randn(8, 6)).draws is draws


def test_outputs_of_the_first_and_of_the_last_micro_batch() -> None:
    plan = plan_of(pipeline(nn.Linear(6, 6), nn.Linear(6, 4)), torch.randn(7, 6))
    assert plan.stage_outputs is not None
    shapes = [[stage.tensors[0].shape for stage in stages] for stages in plan.stage_outputs]
    assert shapes == [[(2, 6), (2, 4)], [(1, 6), (1, 4)]]
    assert len(plan.compiled_stages()) == 4
    assert len(plan_of(pipeline(nn.Linear(6, 6), nn.Linear(6, 4)), torch.randn(8, 6)).compiled_stages()) == 2


def test_outputs_of_a_layer_in_python_are_unknown() -> None:
    with without_warnings():
        plan = plan_of(pipeline(nn.Linear(6, 6), Branch()), torch.randn(8, 6))
    assert plan.stage_outputs is None
    assert plan.compiled_stages() == []


def test_only_a_step_has_a_loss() -> None:
    pipe = pipeline(nn.Linear(6, 6), nn.Linear(6, 4))
    with pytest.raises(ValueError, match="a step computes gradients, but the loss depends on no parameter"):
        plan_of(pipe, torch.randn(8, 6)).first_output(stages_of(pipe)[-1])
