"""Programs: equal bit for bit to the graphs that they were lowered from, and their printed form."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from textwrap import dedent

import pytest
import torch
from torch import Tensor, nn

from bench.models.gpt import Block
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.split import split
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole
from tests.described import describe
from tests.stages import Runner, Values, input_values, run_graphs, saved, trace_joint, unequal

pytestmark = pytest.mark.usefixtures("one_thread")

FRACTIONS = (0.0, 0.5, 1.0)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * b.sigmoid(), b], -1)


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


def tied() -> list[nn.Module]:
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    layers[2].weight = layers[0].weight
    return layers


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
    "identity": (lambda: [nn.Identity()], features),
    "one value twice": (lambda: [nn.Linear(8, 8, bias=False), Residual(Residual())], features),
}


def check_stage(layers: Sequence[nn.Module], x: Tensor) -> None:
    """Checks two micro-batches at every saved fraction; gradients of the second are added to the first's."""
    joint = trace_joint(layers, x)
    values = [input_values(layers, joint, x, seed=seed) for seed in (0, 1)]
    for fraction in FRACTIONS:
        parts = split(joint, fraction)
        assert parts.backward is not None
        forward = Runner(parts.forward_saving, layers)
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


def random_layer(generator: random.Random) -> nn.Module:
    make = generator.choice(
        [
            *[lambda: nn.Linear(8, 8)] * 3,
            *(nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid, Gate, Rotate, nn.Identity),
            lambda: nn.Softmax(-1),
            lambda: nn.LayerNorm(8),
            lambda: nn.Dropout(0.3),
            lambda: nn.BatchNorm1d(8),
            lambda: Residual(nn.Linear(8, 8), nn.Tanh()),
        ]
    )
    return make()


@pytest.mark.smoke
@pytest.mark.parametrize("seed", range(12))
def test_programs_of_random_stages_equal_their_graphs(seed: int) -> None:
    torch.manual_seed(seed)
    generator = random.Random(seed)
    layers = [random_layer(generator) for _ in range(generator.randrange(2, 7))]
    x = torch.randn(4, 8, requires_grad=generator.random() < 0.7)
    if not any(p.requires_grad for layer in layers for p in layer.parameters()):
        x.requires_grad_()
    check_stage(layers, x)


def gradients_by_use(layers: list[nn.Module], x: Tensor, values: Values) -> tuple[Tensor, Tensor]:
    """Returns the gradients of both uses of a tied weight, the later layer's first, in autograd's order."""
    untied = [layers[0], layers[1], nn.Linear(8, 8)]
    untied[2].load_state_dict(layers[2].state_dict())
    (tangent,) = (v for p, v in values.items() if p.role is GraphRole.TANGENT)
    last, first = torch.autograd.grad(
        nn.Sequential(*untied)(x), [untied[2].weight, untied[0].weight], tangent
    )
    return last, first


def test_gradients_of_a_tied_parameter_are_added_one_by_one() -> None:
    """Autograd adds the gradient of each use to one running sum over all micro-batches."""
    torch.manual_seed(0)
    layers, x = tied(), torch.randn(64, 8)
    joint = trace_joint(layers, x)
    parts = split(joint, 0.0)
    assert parts.backward is not None
    runner = Runner(parts.backward, layers)
    values = [input_values(layers, joint, x, seed=seed) for seed in (0, 1)]
    runner(values[0])
    weight = runner(values[1], first=False)[GraphPort(GraphRole.PARAMETER_GRADIENT, 0)]
    (a0, b0), (a1, b1) = (gradients_by_use(layers, x, v) for v in values)
    assert torch.equal(weight, ((a0 + b0) + a1) + b1)
    assert not torch.equal(weight, (a0 + b0) + (a1 + b1))  # the order matters


@pytest.mark.smoke
def test_describe_prints_a_program_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this program, a weight is viewed transposed, and relu works in place."""
    monkeypatch.setattr("gpipe_fast.lower.accumulation.addmm_is_bitwise_equal", lambda a, b: True)
    parts = split(trace_joint([nn.Linear(3, 5), nn.ReLU()], torch.randn(4, 3)), 0.0)
    assert parts.backward is not None
    text = describe(lower(parts.backward))
    assert text == dedent(
        """\
        backward_recompute: 7 calls, 3 views, arena 256 bytes
          input[0] = input[0]:float32[4, 3]
          tangent[0] = tangent[0]:float32[4, 5]
            0  addmm:float32[4, 5]@0 = addmm(parameter[1], input[0], parameter[0]<[3, 5], strides [1, 3]>, 1, 1)  # layer 0
            1  relu:float32[4, 5]@0 = clamp_min(addmm, 0)  # layer 1
            2  threshold_backward:float32[4, 5]@128 = threshold_backward(tangent[0], relu, 0)  # layer 1
            3  allocate grad_0:float32[5, 3]  (first run)
            4  grad_0:float32[5, 3] = mm(threshold_backward<[5, 4], strides [1, 5]>, input[0])  (first run)  # layer 0
            5  grad_0:float32[5, 3] = addmm(grad_0, threshold_backward<[5, 4], strides [1, 5]>, input[0], 1, 1)  (later runs)  # layer 0
            6  allocate grad_1:float32[5]  (first run)
            7  grad_1:float32[1, 5] = sum(threshold_backward, [0], True, None)  (first run)  # layer 0
            8  sum_1:float32[1, 5]@0 = sum(threshold_backward, [0], True, None)  (later runs)  # layer 0
            9  grad_1 += sum_1  (later runs)
          return nothing"""  # noqa: E501
    )


def test_products_accumulate_in_place_only_if_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = split(trace_joint([nn.Linear(3, 5)], torch.randn(4, 3)), 0.0)
    assert parts.backward is not None
    monkeypatch.setattr("gpipe_fast.lower.accumulation.addmm_is_bitwise_equal", lambda a, b: True)
    assert "addmm(" in describe(lower(parts.backward))
    monkeypatch.setattr("gpipe_fast.lower.accumulation.addmm_is_bitwise_equal", lambda a, b: False)
    assert "addmm(" not in describe(lower(parts.backward))
