"""The nodes that regions can compute: units, views that cost nothing, and what is left."""

from __future__ import annotations

from typing import Any

import torch

from gpipe_fast.fuse.regions.graph import UnitGraph
from gpipe_fast.fuse.regions.values import Input, Reduced
from tests.unit.fuse.graphs import graph_of

aten = torch.ops.aten


def units_of(function: Any, *shapes: tuple[int, ...], **options: Any) -> tuple[UnitGraph, list[str]]:
    graph = graph_of(function, *shapes, **options)
    found = UnitGraph(graph.nodes)
    return found, [unit.node.target.__name__ for unit in found.units]  # type: ignore[union-attr]


def test_only_known_operators_are_units() -> None:
    found, names = units_of(lambda x: (x.sin() @ x).cumsum(0).tanh(), (4, 4))
    assert names == ["sin.default", "tanh.default"]
    (read,) = found.units[1].reads
    assert isinstance(read, Input)
    assert found.node_of[read].target is aten.cumsum.default


def test_units_read_results_of_units_behind_views() -> None:
    found, names = units_of(lambda x: x.sin().reshape(2, 6).t().cos(), (4, 3))
    assert names == ["sin.default", "cos.default"]
    sin, cos = found.units
    assert cos.reads == sin.values
    assert found.by_value[sin.values[0]] is sin
    assert len(found.transparent) >= 2


def test_a_norm_is_one_unit_of_the_results_that_are_used() -> None:
    for used, count in ((slice(3), 3), (slice(1), 1)):
        graph = graph_of(lambda x, w: aten.native_layer_norm(x, [6], w, None, 1e-5)[used], (4, 6), (6,))  # noqa: B023
        graph.eliminate_dead_code()
        (unit,) = UnitGraph(graph.nodes).units
        assert len(unit.results) == count
        assert any(isinstance(value, Reduced) for value in unit.values)
        assert {read.shape for read in unit.reads} == {(4, 6), (6,)}


def test_tensors_of_other_dtypes_and_empty_ones_are_left() -> None:
    assert units_of(lambda x: x.sin(), (4, 4), dtypes=[torch.float64])[1] == []
    assert units_of(lambda x: x.sin(), (0, 4))[1] == []
    assert units_of(lambda x: x.sin(), (4, 4), dtypes=[torch.bfloat16])[1] == ["sin.default"]
