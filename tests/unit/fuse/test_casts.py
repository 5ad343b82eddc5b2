"""Hoisted casts of parameters: the same bits, one cast per run of a stage, and no memory in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from bench.models.gpt import Block
from gpipe_fast import GPipe
from gpipe_fast._extension import Arena, Layout, Program
from gpipe_fast.fuse.casts import hoist_parameter_casts
from gpipe_fast.lower.alias import source_of
from gpipe_fast.lower.split import split
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole, JointGraph
from tests.internals import with_hoisted_casts
from tests.reference import Result, pipeline_step
from tests.reference import unequal as differences
from tests.stages import Runner, Values, input_values, saved, saved_shapes, trace_joint, unequal

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten
BF16 = torch.bfloat16


class Tied(nn.Module):
    """Reads a weight three times: twice cast, the second time transposed, and once as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.linear(x, self.weight)
        h = nn.functional.linear(h.relu(), self.weight.t())
        return h * self.weight.sum()


class Part(nn.Module):
    """Casts a part of each of two weights: some rows, and some columns."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(8, 12))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, self.rows[4:])
        return nn.functional.linear(x, self.columns[:, :8])


class Returned(nn.Module):
    """Returns a cast parameter, and a parameter cast to two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.other.bfloat16() + self.other.double(), self.weight.bfloat16()


def frozen() -> list[nn.Module]:
    layers = [nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)]
    layers[0].requires_grad_(False)
    return layers


STAGES: dict[str, tuple[Callable[[], list[nn.Module]], Callable[[], Tensor]]] = {
    "block": (lambda: [Block(8, 2)], lambda: torch.randn(2, 5, 8)),
    "tied": (lambda: [Tied(), nn.Tanh()], lambda: torch.randn(4, 8)),
    "part": (lambda: [Part()], lambda: torch.randn(4, 8)),
    "returned": (lambda: [Returned()], lambda: torch.randn(4, 8)),
    "frozen": (frozen, lambda: torch.randn(4, 8)),
}


def trace(name: str) -> tuple[list[nn.Module], JointGraph, Tensor]:
    torch.manual_seed(0)
    make_layers, make_input = STAGES[name]
    layers, x = make_layers(), make_input().requires_grad_()
    with torch.autocast("cpu", BF16, cache_enabled=False):
        return layers, trace_joint(layers, x), x


def casts_of_parameters(joint: JointGraph) -> int:
    parameters = {node for port, node in joint.inputs if port.role is GraphRole.PARAMETER}
    casts = [n for n in joint.module.graph.nodes if n.target is aten._to_copy.default]
    return sum(source_of(n.all_input_nodes[0]).base in parameters for n in casts)


def microbatches(layers: Sequence[nn.Module], joint: JointGraph, x: Tensor, fraction: float) -> list[Values]:
    """Returns the results of two micro-batches, with the gradients of parameters summed over both."""
    parts = split(joint, fraction)
    assert parts.backward is not None
    arena = Arena()
    forward, backward = (Runner(g, layers, arena=arena) for g in (parts.forward, parts.backward))
    results = []
    for first, scale in ((True, 1.0), (False, -0.5)):
        values = input_values(layers, joint, x * scale, seed=int(first))
        outputs = forward(values)
        gradients = backward(values | saved(outputs), first)
        outputs = {port: value for port, value in outputs.items() if port.role is not GraphRole.SAVED}
        results.append({port: value.clone() for port, value in (outputs | gradients).items()})
    return results


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("block", [f"parameter_cast[{i}] to bfloat16" for i in (5, 4, 7, 6, 9, 8, 11, 10)]),
        ("tied", ["parameter_cast[0] to bfloat16"]),
        ("part", []),
        (
            "returned",
            [f"parameter_cast[{i}] to {d}" for i, d in ((1, "bfloat16"), (1, "float64"), (0, "bfloat16"))],
        ),
        ("frozen", [f"parameter_cast[{i}] to bfloat16" for i in (1, 0, 3, 2)]),
    ],
)
def test_casts_of_whole_parameters_are_hoisted_and_keep_the_bits(name: str, expected: list[str]) -> None:
    layers, joint, x = trace(name)
    hoisted = hoist_parameter_casts(joint)
    ports = [str(port) for port, _ in hoisted.inputs if port.role is GraphRole.PARAMETER_CAST]
    assert ports == expected
    assert casts_of_parameters(hoisted) == {"part": 2, "tied": 1}.get(name, 0)
    assert (hoisted is joint) == (not expected)
    for fraction in (0.0, 0.5, 1.0):
        plain = microbatches(layers, joint, x, fraction)
        found = microbatches(layers, hoisted, x, fraction)
        assert [unequal(*each) for each in zip(found, plain, strict=True)] == [[], []], fraction


def test_cast_weights_are_not_saved() -> None:
    _, joint, _ = trace("block")
    before, after = (saved_shapes(split(j, 1.0)) for j in (joint, hoist_parameter_casts(joint)))
    weights = {(24, 8), (8, 8), (32, 8), (8, 32)}
    assert weights <= {*before}
    assert weights.isdisjoint(after)


def test_a_returned_cast_is_a_copy() -> None:
    layers, joint, x = trace("returned")
    runner = Runner(split(hoist_parameter_casts(joint), 0.0).forward, layers)
    values = input_values(layers, joint, x)
    port = GraphPort(GraphRole.OUTPUT, 1)
    first = runner(values)[port]
    expected = first.clone()
    first.zero_()
    assert torch.equal(runner(values)[port], expected)


def test_a_program_refuses_a_parameter_of_another_shape() -> None:
    program = Program(Arena(), torch.device("cpu"))
    program.add_parameter_cast(0, Layout([2, 3], [3, 1], BF16))
    program.bind([torch.ones(2, 3)])
    with pytest.raises(
        RuntimeError, match=r"the cast of parameter 0 was lowered as BFloat16\[2, 3\], got \[3, 2\]"
    ):
        program.bind([torch.ones(3, 2)])


# Pipelines


class Branching(nn.Module):
    """Branches on values, so that its stage has three segments."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() if x.sum() > 0 else x.sigmoid()


def gpt_like() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), Block(8, 2), nn.Linear(8, 8))


def tied_stages() -> nn.Sequential:
    """Ties weights within a stage, and between the stages."""
    layers = [nn.Linear(8, 8) for _ in range(6)]
    layers[1].weight = layers[4].weight = layers[0].weight
    return nn.Sequential(*layers)


def in_segments() -> nn.Sequential:
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = first.weight
    return nn.Sequential(nn.Sequential(first, nn.GELU()), Branching(), last, nn.Linear(8, 8))


@pytest.mark.filterwarnings("ignore:.*runs in Python")
@pytest.mark.parametrize(
    ("make", "balance", "checkpoint"),
    [(gpt_like, [2, 1], "except_last"), (tied_stages, [3, 3], "never"), (in_segments, [4], "always")],
)
def test_pipelines_keep_the_bits(
    make: Callable[[], nn.Sequential], balance: list[int], checkpoint: str
) -> None:
    """With 7 samples the last of four micro-batches is smaller; a changed weight is cast anew."""

    def train() -> list[Result]:
        torch.manual_seed(0)
        model, found = make(), []
        pipe = GPipe(model, balance, devices=["cpu"] * len(balance), chunks=4, checkpoint=checkpoint)
        for size in (7, 8, 8):
            x = torch.randn(size, 5, 8, generator=torch.Generator().manual_seed(size))
            with torch.autocast("cpu", BF16, cache_enabled=False):
                found.append(pipeline_step(pipe, x))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
        return found

    expected = train()
    with with_hoisted_casts():
        found = train()
    assert [differences(*each) for each in zip(found, expected, strict=True)] == [[]] * 3
