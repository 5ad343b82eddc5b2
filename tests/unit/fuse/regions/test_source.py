"""The generated source of small regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from gpipe_fast.fuse.regions.graph import UnitGraph
from gpipe_fast.fuse.regions.kernel import block_of
from gpipe_fast.fuse.regions.loops import Access, Region, loops_of
from gpipe_fast.fuse.regions.source import Source, source_of
from tests.unit.fuse.graphs import graph_of

BF16, CPU = torch.bfloat16, torch.device("cpu")


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


def source(
    function: Callable[..., Any], *shapes: Sequence[int], dtypes: Sequence[torch.dtype] = ()
) -> Source:
    region = region_of(function, *shapes, dtypes=dtypes)
    block, _ = block_of(region, CPU)
    return source_of(region, block)


def test_every_program_stores_a_partial_sum_and_one_that_has_all_rows_the_sum() -> None:
    for rows, offset in ((300, "program.to(tl.int64) * 96 + col"), (3, "col")):
        found = source(lambda x, g: (g * x, (g * x).sum(0)), (rows, 96), (rows, 96))
        assert f"tl.store(p_out1 + {offset}, tl.sum(" in found.text


def test_one_kernel_computes_tensors_of_any_length() -> None:
    first, second = (source(lambda x: torch.tanh(x) * 2.0, (rows, 64)) for rows in (512, 600))
    assert first == second
    assert "m_col = col < num_cols\n" in first.text
    assert "@triton.jit\n" in first.text, "compiled for lengths that 16 divides"
