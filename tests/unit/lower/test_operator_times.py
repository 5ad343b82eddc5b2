"""Times of operators: measured once for equal calls, or estimated from operations and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

from gpipe_fast.lower import operator_times
from gpipe_fast.lower.operator_times import nanoseconds
from tests.stages import trace_joint

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def no_known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_times, "_known", {})


@pytest.fixture
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def operators(*layers: nn.Module, x: Tensor) -> list[fx.Node]:
    nodes = trace_joint(layers, x).module.graph.nodes
    return [n for n in nodes if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)]


def find(nodes: list[fx.Node], target: object) -> list[fx.Node]:
    return [node for node in nodes if node.target is target]


def test_equal_calls_are_measured_once() -> None:
    nodes = operators(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 5), x=torch.randn(3, 4))
    with mock.patch.object(operator_times, "_measured", wraps=operator_times._measured) as measured:
        times = [nanoseconds(node) for node in find(nodes, aten.addmm.default)]
    assert measured.call_count == 2
    assert times[0] == times[1] >= 1


def test_a_measurement_leaves_random_numbers_and_modes_alone() -> None:
    nodes = operators(
        nn.Embedding(5, 4),
        nn.Dropout(0.5),
        nn.LayerNorm(4),
        nn.TransformerEncoderLayer(4, 2, 8),
        x=torch.zeros(3, 2, dtype=torch.long),
    )
    state = torch.get_rng_state()
    with torch.autocast("cpu"), mock.patch.object(operator_times, "_estimated") as estimated:
        assert all(nanoseconds(node) >= 1 for node in nodes)
    estimated.assert_not_called()
    assert torch.equal(torch.get_rng_state(), state)


def test_an_operator_that_fails_is_estimated() -> None:
    (node,) = find(operators(nn.Tanh(), x=torch.randn(1_000)), aten.tanh.default)
    with mock.patch.object(node, "target", aten.cholesky_inverse.default):
        assert nanoseconds(node) == 1_000 + 8_000 // 10


@pytest.mark.usefixtures("deterministic_algorithms")
def test_estimates_count_operations_and_bytes() -> None:
    nodes = operators(nn.Linear(100, 200), nn.Tanh(), x=torch.randn(300, 100))
    with mock.patch.object(operator_times, "_measured") as measured:
        (product,), (tanh,) = (find(nodes, op.default) for op in (aten.addmm, aten.tanh))
        moved = 4 * (300 * 100 + 100 * 200 + 200 + 300 * 200)
        assert nanoseconds(product) == 1_000 + moved // 10 + 2 * 300 * 100 * 200 // 50
        assert nanoseconds(tanh) == 1_000 + 4 * 2 * 300 * 200 // 10
    measured.assert_not_called()
