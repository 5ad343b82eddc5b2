"""Ladders of stages: nested rungs, the limit on bytes, and what the backward then recomputes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor, fx, nn

from bench.models.gpt import blocks
from gpipe_fast.lower.alias import source_of
from gpipe_fast.lower.ladder import (
    Choices,
    Ladder,
    Operator,
    Recomputed,
    Rung,
    SaveableValue,
    bytes_of,
    is_backward,
)
from gpipe_fast.lower.operator_times import nanoseconds
from gpipe_fast.lower.split import JOINT_POSITION, split
from gpipe_fast.trace.joint_graph import JointGraph
from tests.stages import saved_nodes, trace_joint

SHARES = [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0]


@pytest.fixture(autouse=True)
def estimated_times() -> Iterator[None]:
    """Estimates times, so that ladders are the same in every run."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.second(torch.relu(self.norm(self.first(x))))
        return found.relu()


def gpt() -> JointGraph:
    layers = [*blocks(1, 16, 2), nn.Dropout(0.1), *blocks(1, 16, 2)]
    return trace_joint(layers, torch.randn(2, 8, 16, requires_grad=True))


def resnet() -> JointGraph:
    layers = [nn.Conv2d(3, 4, 3), Residual(4), Residual(4), nn.Flatten(), nn.Linear(64, 3)]
    return trace_joint(layers, torch.randn(2, 3, 6, 6))


every_model = pytest.mark.parametrize("make", [gpt, resnet])


def kept(joint: JointGraph, share: float) -> int:
    return sum(bytes_of(node.meta["val"]) for node in saved_nodes(split(joint, share)))


def recomputed(joint: JointGraph, share: float) -> int:
    """Returns the time of the forward operators in the backward's graph, besides views."""
    backward = split(joint, share).backward
    assert backward is not None
    nodes = list(joint.module.graph.nodes)
    found: set[fx.Node] = set()
    for copy in backward.module.graph.nodes:
        node = nodes[copy.meta[JOINT_POSITION]] if copy.op == "call_function" else copy
        if node.op != "call_function" or is_backward(node) or source_of(node).base is not node:
            continue
        if isinstance(node.meta["val"], Tensor):
            found.add(node.args[0] if "getitem" in node.name else node)
    return sum(map(nanoseconds, found))


def rung_of(joint: JointGraph, share: float) -> Rung:
    ladder = Ladder.of(joint)
    values = {n.name: n.meta.get("val") for n in joint.module.graph.nodes}
    index, _ = ladder.furthest(lambda name: bytes_of(values[name]), share)
    return ladder.rungs[index]


@pytest.mark.smoke
@every_model
def test_no_share_keeps_more_than_it_says_and_more_never_recomputes_more(
    make: Callable[[], JointGraph],
) -> None:
    joint = make()
    whole = kept(joint, 1.0)
    shares = [i / 10 for i in range(11)]
    bytes_kept = [kept(joint, share) for share in shares]
    assert all(size <= share * whole for size, share in zip(bytes_kept, shares, strict=True))
    assert bytes_kept == sorted(bytes_kept)
    assert len(set(bytes_kept)) >= 6
    times = [recomputed(joint, share) for share in shares]
    assert times == sorted(times, reverse=True)


@every_model
def test_a_rung_knows_what_the_backward_recomputes(make: Callable[[], JointGraph]) -> None:
    joint = make()
    for share in SHARES:
        assert rung_of(joint, share).recompute == recomputed(joint, share)


def test_half_of_the_bytes_of_gpt_blocks_cost_little_recompute() -> None:
    joint = trace_joint([*blocks(3, 256, 8)], torch.empty(2, 128, 256, requires_grad=True))
    rungs = Ladder.of(joint).rungs
    assert rung_of(joint, 0.5).recompute < 0.3 * rungs[0].recompute
    assert rung_of(joint, 0.7).recompute < 0.1 * rungs[0].recompute
    assert len(rungs) > 3 * 6


def test_equal_layers_are_saved_one_after_another() -> None:
    joint = trace_joint([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)], torch.randn(3, 4))
    sizes = [kept(joint, i / 5) for i in range(6)]
    assert sizes == [0, 48, 96, 144, 192, 240]


def drawn(seed: int) -> Choices:
    """Returns a random graph; some operators have several results, and many are equal."""
    draw = random.Random(seed)
    operators: list[Operator] = []
    values: list[SaveableValue] = []
    for index in range(draw.randint(1, 9)):
        reads = draw.sample(range(len(values)), min(len(values), draw.randint(0, 3)))
        operators.append(Operator(draw.choice([1, 2, 2, 5, 9]), frozenset(reads)))
        for _ in range(draw.choice([1, 1, 1, 2])):
            values.append(SaveableValue(draw.choice([0, 1, 3, 3, 8]), index, draw.random() < 0.4))
    return Choices(operators, values)


def cost(choices: Choices, recomputed: Recomputed) -> tuple[int, int]:
    """Returns the bytes that are saved, and the time of the recomputed operators."""
    saved = choices.saved(recomputed, range(len(choices.values)))
    return sum(choices.values[i].size for i in saved), sum(choices.operators[i].time for i in recomputed)


def least(costs: list[tuple[int, int]], limit: float) -> int:
    return min(time for size, time in costs if size <= limit)


def test_choices_are_nested_and_nearly_the_best_ones() -> None:
    """Compared with all sets of operators of small random graphs."""
    taken = best = 0
    for seed in range(100):
        choices = drawn(seed)
        found = choices.nested()
        costs = [cost(choices, each) for each in found]
        assert (costs[0][0], found[-1]) == (0, frozenset())
        assert all(less < more for more, less in pairwise(found))
        assert costs == sorted(costs, key=lambda pair: pair[0])
        numbers = range(len(choices.operators))
        sets = [frozenset(s) for size in range(len(numbers) + 1) for s in combinations(numbers, size)]
        every = [cost(choices, each) for each in sets]
        for share in SHARES:
            taken += least(costs, share * costs[-1][0])
            best += least(every, share * costs[-1][0])
    assert taken <= 1.05 * best
