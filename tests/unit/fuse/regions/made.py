"""Regions of whole graphs: all operators of a function in one region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from gpipe_fast.fuse.regions.graph import UnitGraph
from gpipe_fast.fuse.regions.loops import Access, Loops, Region, loops_of
from tests.unit.fuse.graphs import graph_of


def region_of(
    function: Callable[..., Any], *shapes: Sequence[int], dtypes: Sequence[torch.dtype] = ()
) -> Region:
    """Returns the region that computes a function of CUDA tensors.

    Raises:
        Conflict: no loops compute all of it.
    """
    graph = graph_of(function, *shapes, dtypes=dtypes)
    units = UnitGraph(graph.nodes)
    (results,) = graph.output_node().args
    outputs = [results] if isinstance(results, fx.Node) else list(results)  # type: ignore[arg-type]
    own = {value for unit in units.units for value in unit.values}
    read = dict.fromkeys(r for unit in units.units for r in unit.reads if r not in own)
    inputs = [Access(units.node_of[r], r) for r in read]
    stored = [Access(node, units.value_of(node)) for node in outputs]
    tensors = {access.value: access.tensor for access in (*inputs, *stored)}
    loops = loops_of(units.units, [access.value for access in stored], tensors)
    return Region(tuple(units.units), loops, tuple(inputs), tuple(stored))


def sizes(loops: Loops) -> tuple[list[int], list[int]]:
    """Returns the sizes of the axes of rows, and of columns."""
    return [loops.sizes[a] for a in loops.rows], [loops.sizes[a] for a in loops.cols]
