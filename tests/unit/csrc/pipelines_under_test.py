"""Helpers of the failure tests: models, and a pipeline whose state is compared before and after a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.internals import remove_faults
from tests.reference import Result, loop_step, pipeline_step, unequal

K, M = 3, 4


def mlp() -> tuple[nn.Sequential, Tensor]:
    """Returns a model with batch norm in every stage and dropout in two, and its input."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)),
        *(nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8)),
        *(nn.Dropout(0.2), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)),
    )
    return model, torch.randn(12, 6)


@dataclass
class PipelineUnderTest:
    """A pipeline, an input, and the expected results of one training step."""

    pipe: GPipe
    x: Tensor
    expected: Result
    initial_state: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.initial_state = {name: tensor.clone() for name, tensor in self.pipe.state_dict().items()}

    def state(self) -> Result:
        """Copies everything that a failure must not change: parameters, buffers and gradients."""
        state: Result = {name: tensor.clone() for name, tensor in self.pipe.state_dict().items()}
        for name, parameter in self.pipe.named_parameters():
            state[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
        return state

    def reset(self) -> None:
        self.pipe.load_state_dict(self.initial_state)
        self.set_gradients(False)

    def set_gradients(self, present: bool) -> None:
        for parameter in self.pipe.parameters():
            parameter.grad = torch.full_like(parameter, 0.1) if present else None

    def next_step_is_correct(self) -> bool:
        """Returns whether a step from the initial parameters and buffers gives the expected results."""
        self.reset()
        remove_faults(self.pipe)
        return unequal(pipeline_step(self.pipe, self.x), self.expected) == []


def pipeline_under_test(make: Callable[[], tuple[nn.Sequential, Tensor]]) -> PipelineUnderTest:
    model, x = make()
    return PipelineUnderTest(GPipe(model, [3, 3, 4], chunks=M), x, loop_step(model, x, M))
