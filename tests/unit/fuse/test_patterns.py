"""Patterns are found wherever their operators are, with any sizes, and nowhere else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gpipe_fast.fuse.patterns import (
    BATCH,
    COLUMNS,
    TARGET_WEIGHT,
    Graph,
    Match,
    trace_pattern,
)
from tests.unit.fuse.graphs import FP32, calls, graph_of

aten = torch.ops.aten
BF16 = torch.bfloat16


def matches(
    pattern: Callable[..., Any],
    arguments: Sequence[tuple[Sequence[int], torch.dtype]],
    function: Callable[..., Any],
    *shapes: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...] = (),
) -> list[Match]:
    traced = trace_pattern(pattern, arguments)
    graph = Graph(graph_of(function, *shapes, dtypes=dtypes))
    found = list(graph.matches(traced))
    assert not found or graph.may_have(traced)
    return found


ROWS = [((BATCH, COLUMNS), FP32)]
TWO = [((BATCH, COLUMNS), FP32), ((BATCH, COLUMNS), FP32)]


def norm(x: Tensor, eps: float = TARGET_WEIGHT) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def test_a_match_returns_sizes_numbers_and_nodes() -> None:
    graph = graph_of(lambda x: norm(x.tanh(), 1e-6).exp(), (2, 32))
    traced = trace_pattern(norm, ROWS)
    assert not torch.cuda.is_initialized()
    (match,) = Graph(graph).matches(traced)
    assert match.sizes == {BATCH: 2, COLUMNS: 32}
    assert match.numbers == {"target_weight": 1e-6}
    assert match.nodes[traced.inputs[0]] is calls(graph, aten.tanh.default)[0]
    assert match.nodes[traced.outputs[0]] is calls(graph, aten.exp.default)[0].args[0]


def selected(position: int) -> Callable[[Tensor], Tensor]:
    return lambda x: aten.native_layer_norm(x, [x.shape[-1]], None, None, 0.5)[position].exp()


@pytest.mark.parametrize(
    ("pattern", "other"),
    [
        (lambda x: x.pow(3), lambda x: x.pow(2)),
        (lambda x: x.clamp(max=float("inf")), lambda x: x.clamp(max=2.0)),
        (lambda x: x.log_softmax(1), lambda x: x.log_softmax(0)),
        (selected(1), selected(2)),
        (lambda x, y: x.exp() - y, lambda x, y: y - x.exp()),
        (lambda x, y: torch.add(x.exp(), y, alpha=2), lambda x, y: torch.add(y, x.exp(), alpha=2)),
        (lambda x, y: (x.exp() + y) * y.sin(), lambda x, y: (x.exp() + y) * x.sin()),
        (lambda x: (x + TARGET_WEIGHT).tanh() + TARGET_WEIGHT, lambda x: (x + 0.5).tanh() + 0.25),
    ],
    ids=["number", "infinity", "dimension", "result", "difference", "scaled", "summand", "one number"],
)
def test_a_pattern_matches_itself_and_no_other(pattern: Any, other: Any) -> None:
    count = len(inspect.signature(pattern).parameters)
    assert matches(pattern, TWO[:count], pattern, *[(3, 3)] * count)
    assert matches(pattern, TWO[:count], other, *[(3, 3)] * count) == []


@pytest.mark.parametrize(
    ("function", "shapes", "dtypes"),
    [
        (norm, [(2, 3, 32)], [FP32]),
        (norm, [(32,)], [FP32]),
        (norm, [(2, 32)], [BF16]),
        (lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6), [(2, 32)], [FP32]),
        (lambda x, y: y * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6), [(2, 32)] * 2, [FP32] * 2),
        (lambda x, e: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + e), [(2, 32), ()], [FP32] * 2),
    ],
    ids=["more dimensions", "fewer dimensions", "dtype", "reduction", "factor", "a tensor for a number"],
)
def test_what_differs_does_not_match(function: Any, shapes: Any, dtypes: Any) -> None:
    assert matches(norm, ROWS, function, *shapes, dtypes=dtypes) == []


def test_a_number_that_is_a_size_is_the_graphs_size() -> None:
    def mean(columns: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x.sum(-1, keepdim=True) / columns * x

    assert matches(mean(COLUMNS), ROWS, mean(32), (2, 32))
    assert matches(mean(COLUMNS), ROWS, mean(31), (2, 32)) == []
    assert matches(mean(COLUMNS), ROWS, mean(COLUMNS), (2, 32)) == []
    assert matches(mean(COLUMNS + 0.5), ROWS, mean(32), (2, 32)) == []


def test_sums_products_and_dimensions_have_several_forms() -> None:
    def ours(x: Tensor, y: Tensor) -> Tensor:
        return (x.exp() + y) * y.sin()

    for function in (lambda x, y: (y + x.exp()) * y.sin(), lambda x, y: y.sin() * (x.exp() + y)):
        assert len(matches(ours, TWO, function, (2, 3), (2, 3))) == 1
    assert matches(lambda x: x.log_softmax(1), ROWS, lambda x: x.log_softmax(-1), (2, 3))


def test_one_size_of_the_pattern_is_one_size_of_the_graph() -> None:
    assert matches(torch.mul, TWO, torch.mul, (4, 4), (4, 4))
    assert matches(torch.mul, TWO, torch.mul, (2, 3), (1, 3)) == []
    assert matches(torch.mul, [((BATCH, 1), FP32), ROWS[0]], torch.mul, (2, 3), (2, 3)) == []


def test_what_changes_nothing_is_stripped() -> None:
    def plain(x: Tensor) -> Tensor:
        return (x.exp() + 1).tanh()

    def with_views(x: Tensor) -> Tensor:
        h = x.detach().exp()
        return (h.view(h.shape).detach() + 1).view(x.shape).tanh().detach()

    assert len(matches(plain, ROWS, with_views, (2, 3))) == 1
    assert len(matches(with_views, ROWS, plain, (2, 3))) == 1
    assert matches(plain, ROWS, lambda x: (x.exp().view(3, 2) + 1).view(2, 3).tanh(), (2, 3)) == []


def test_all_outputs_belong_to_one_match() -> None:
    def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x.exp() * y).sin(), x.exp().sum(0)

    graph = graph_of(lambda x, y: (*two(x, y), *two(y, x)), (2, 3), (2, 3))
    traced = trace_pattern(two, TWO)
    found = list(Graph(graph).matches(traced))
    assert len(found) == 2
    for match in found:
        x, sine, total = (match.nodes[n] for n in (traced.inputs[0], *traced.outputs))
        assert sine.target is aten.sin.default
        assert total.all_input_nodes[0].all_input_nodes == [x]
    assert matches(two, TWO, lambda x, y: ((x.exp() * y).sin(), y.exp().sum(0)), (2, 3), (2, 3)) == []


def test_patterns_with_constant_tensors_match_nothing() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x.exp() * torch.tensor(2.0)

    assert matches(scaled, ROWS, scaled, (2, 3)) == []


def test_graphs_without_an_operator_are_told_apart_without_a_search() -> None:
    graph = Graph(graph_of(lambda x: x.exp() + 1, (2, 3)))
    assert graph.may_have(trace_pattern(lambda x: x.exp() + 2, ROWS))
    assert not graph.may_have(trace_pattern(lambda x: x.sin() + 1, ROWS))
