"""Gradients of parameters that are used more than once: one running sum of all uses, in autograd's order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast.lower.split import split
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole
from tests.reference import check_step
from tests.stages import Runner, input_values, trace_joint

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8


class Weight(nn.Module):
    """A matrix parameter that ``function`` uses."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


class Biases(nn.Module):
    """Two parameters with the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first + self.second


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "once": lambda x, w: x @ w,
    "twice": lambda x, w: (x @ w).tanh() @ w,
    "three times": lambda x, w: ((x @ w).tanh() @ w).tanh() @ w,
    "five times, transposed": lambda x, w: (((x @ w).tanh() @ w.t()).tanh() @ w).tanh() @ w.t() @ w,
    "as a whole and in part": lambda x, w: (x @ w).tanh() @ w + x * w[0] + w.sum(),
    "expanded": lambda x, w: x + w[0].expand(x.shape),
    "sliced": lambda x, w: torch.cat([x[:, :4] @ w[:4, :4], x[:, 4:] @ w[4:, 4:]], 1),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_gradients_of_all_uses_are_summed_in_autograds_order(use: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    check_step(nn.Sequential(nn.Linear(WIDTH, WIDTH), Weight(use), nn.Tanh()), torch.randn(64, WIDTH), 4)


def test_equal_gradients_of_two_parameters_have_separate_memory() -> None:
    """Additions to one parameter's gradient must not change the other's."""
    torch.manual_seed(0)
    check_step(nn.Sequential(Biases(), nn.Linear(WIDTH, 2)), torch.randn(64, WIDTH), 4)


def test_a_boundary_gradient_shares_no_memory_with_an_accumulator() -> None:
    """One tensor can be the gradient of an input and of a parameter."""
    layers = [Weight(lambda x, w: (x + w).tanh())]
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    joint = trace_joint(layers, x)
    backward = split(joint, 0.0).backward
    assert backward is not None
    results = Runner(backward, layers)(input_values(layers, joint, x))
    of_input, of_weight = (
        results[GraphPort(GraphRole.INPUT_GRADIENT, 0)],
        results[GraphPort(GraphRole.PARAMETER_GRADIENT, 0)],
    )
    assert torch.equal(of_input, of_weight)
    assert of_input.data_ptr() != of_weight.data_ptr()
