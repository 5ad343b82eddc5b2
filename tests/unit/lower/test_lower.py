"""Programs: equal bit for bit to the graphs that they were lowered from, and their printed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from bench.models.gpt import Block
from gpipe_fast.lower.split import split
from gpipe_fast.trace.joint_graph import GraphRole
from tests.stages import Runner, Values, input_values, run_graphs, saved, trace_joint, unequal

pytestmark = pytest.mark.usefixtures("one_thread")

FRACTIONS = (0.0, 0.5, 1.0)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Rotate(nn.Module):
    """A rotary embedding, which views its input as another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
        rotated = pairs * torch.polar(torch.ones(4), torch.arange(4.0))
        return torch.view_as_real(rotated).flatten(-2)


class TwoViews(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.t()[1:].t()


class Join(nn.Module):
    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(x, 1) @ torch.cat(x, 1).t()


def features() -> Tensor:
    return torch.randn(4, 8, requires_grad=True)


def image() -> Tensor:
    return torch.randn(2, 3, 6, 6, requires_grad=True)


STAGES: dict[str, tuple[Callable[[], list[nn.Module]], Callable[[], Tensor]]] = {
    "mlp": (lambda: [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)], features),
    "block": (lambda: [Block(8, 2)], lambda: torch.randn(2, 5, 8, requires_grad=True)),
    "convolution": (lambda: [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)], image),
    "embedding": (lambda: [nn.Embedding(9, 8), nn.LayerNorm(8)], lambda: torch.arange(8).view(2, 4)),
    "dropout": (lambda: [nn.Linear(8, 8), nn.Dropout(0.4), nn.GELU(), nn.Dropout(0.2)], features),
    "complex": (lambda: [nn.Linear(8, 8), Rotate(), nn.Linear(8, 8), nn.Tanh(), Rotate()], features),
    "views of one value": (lambda: [nn.Linear(8, 8), TwoViews()], features),
    "views across layers": (lambda: [TwoViews(), Join(), nn.Softmax(1)], features),
    "in-place layers": (lambda: [nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True)], features),
    "one value twice": (lambda: [nn.Linear(8, 8, bias=False), Residual(Residual())], features),
}


def check_stage(layers: Sequence[nn.Module], x: Tensor) -> None:
    """Checks two micro-batches at every saved fraction; gradients of the second are added to the first's."""
    joint = trace_joint(layers, x)
    values = [input_values(layers, joint, x, seed=seed) for seed in (0, 1)]
    for fraction in FRACTIONS:
        parts = split(joint, fraction)
        assert parts.backward is not None
        forward = Runner(parts.forward, layers)
        backward = Runner(parts.backward, layers)
        expected: Values = {}
        for number, ports in enumerate(values):
            graph_results = run_graphs(parts, ports)
            outputs = forward(ports)
            assert unequal(outputs, graph_results[0]) == [], f"forward, saved fraction {fraction}"
            expected = accumulated(expected, graph_results[1])
            gradients = backward(ports | saved(outputs), first=number == 0)
            assert unequal(gradients, expected) == [], f"backward {number}, saved fraction {fraction}"


def accumulated(sums: Values, new: Values) -> Values:
    """Adds gradients of parameters to ``sums``; gradients of inputs are new in each run."""
    is_sum = GraphRole.PARAMETER_GRADIENT
    return {p: sums[p] + v if p.role is is_sum and p in sums else v for p, v in new.items()}


@pytest.mark.smoke
@pytest.mark.parametrize(("layers", "x"), STAGES.values(), ids=STAGES.keys())
def test_programs_equal_their_graphs(layers: Callable[[], list[nn.Module]], x: Callable[[], Tensor]) -> None:
    torch.manual_seed(0)
    check_stage(layers(), x())
