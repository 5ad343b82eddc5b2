"""The nodes that regions can compute: units, views that cost nothing, and what is left."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_fast.fuse.regions.graph import UnitGraph
from gpipe_fast.fuse.regions.values import Input, Reduced, View
from tests.unit.fuse.graphs import calls, graph_of

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


def test_a_norm_is_one_unit_of_several_results() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return aten.native_layer_norm(x, [6], w, None, 1e-5)  # type: ignore[no-any-return]

    found, names = units_of(function, (4, 6), (6,))
    assert names == ["native_layer_norm.default"]
    (unit,) = found.units
    assert len(unit.results) == 3
    assert any(isinstance(value, Reduced) for value in unit.values)
    assert not any(isinstance(value, View) for value in unit.values)
    assert {read.shape for read in unit.reads} == {(4, 6), (6,)}


def test_unused_results_are_not_computed() -> None:
    graph = graph_of(lambda x: F.layer_norm(x, (6,)), (4, 6))
    graph.eliminate_dead_code()
    (unit,) = UnitGraph(graph.nodes).units
    assert len(unit.results) == 1


def test_tensors_of_other_dtypes_and_empty_ones_are_left() -> None:
    assert units_of(lambda x: x.sin(), (4, 4), dtypes=[torch.float64])[1] == []
    assert units_of(lambda x: x.sin(), (0, 4))[1] == []
    assert units_of(lambda x: x.sin(), (4, 4), dtypes=[torch.bfloat16])[1] == ["sin.default"]


def test_positions_are_those_of_the_graph() -> None:
    graph = graph_of(lambda x: x.sin().cos(), (4,))
    found = UnitGraph(graph.nodes)
    assert [list(graph.nodes)[unit.position] for unit in found.units] == calls(graph)
