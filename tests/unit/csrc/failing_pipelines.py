"""What the tests of failures share: models, and a pipeline whose state is compared before and after one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.inside import disturb_no_more
from tests.reference import Result, loop_step, pipeline_step, unequal

K, M = 3, 4


def mlp() -> tuple[nn.Sequential, Tensor]:
    """Buffers and random draws in every stage that has parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)),
        *(nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8)),
        *(nn.Dropout(0.2), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)),
    )
    return model, torch.randn(12, 6)


def convolutions() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        *(nn.Dropout(0.3), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)),
        *(nn.AlphaDropout(0.1), nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 3)),
    )
    return model, torch.randn(12, 3, 6, 6)


MODELS = {"mlp": mlp, "convolutions": convolutions}


@dataclass
class Pipe:
    """A pipeline, and what one of its steps must give."""

    pipe: GPipe
    x: Tensor
    expected: Result
    start: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.start = {name: tensor.clone() for name, tensor in self.pipe.state_dict().items()}

    def state(self) -> Result:
        """Everything that a failure must not change."""
        state: Result = {name: tensor.clone() for name, tensor in self.pipe.state_dict().items()}
        for name, parameter in self.pipe.named_parameters():
            state[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
        return state

    def start_again(self) -> None:
        self.pipe.load_state_dict(self.start)
        self.set_gradients(False)

    def set_gradients(self, present: bool) -> None:
        for parameter in self.pipe.parameters():
            parameter.grad = torch.full_like(parameter, 0.1) if present else None

    def next_step_is_right(self) -> bool:
        """From the parameters and buffers that the first step met."""
        self.start_again()
        disturb_no_more(self.pipe)
        return unequal(pipeline_step(self.pipe, self.x), self.expected) == []


def open_pipe(make: Callable[[], tuple[nn.Sequential, Tensor]]) -> Pipe:
    model, x = make()
    return Pipe(GPipe(model, [3, 3, 4], chunks=M), x, loop_step(model, x, M))
