"""The launch of a region's kernel, as a fragment that replaces the region's nodes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gpipe_fast.fuse.cubin import kernel_of
from gpipe_fast.fuse.launchers import trace_launcher
from gpipe_fast.fuse.regions.loops import Region
from gpipe_fast.fuse.regions.source import Block, Source, source_of
from gpipe_fast.fuse.regions.values import root_of
from gpipe_fast.kernels.launch import Config, cdiv, launch, next_power_of_2, num_partial_sums
from gpipe_fast.kernels.partial_sums import launch_partial_sums

# Elements of a block, and of a thread: more would need more registers than a thread has.
_BLOCK, _PER_THREAD = 1024, 8
_WARP = 32
_MAX_WARPS = 16
# Columns of a block if rows may be divided.
_MAX_COLS = 256


# By everything that they depend on.
_fragments: dict[Hashable, fx.Graph] = {}


def block_of(region: Region, device: torch.device) -> tuple[Block, int]:
    """Returns a region's block, and the number of programs that share its rows."""
    loops = region.loops
    cols = next_power_of_2(loops.num_cols)
    if not loops.whole_rows:
        cols = min(cols, _MAX_COLS if loops.rows else _BLOCK)
    rows = min(max(1, _BLOCK // cols), next_power_of_2(loops.num_rows))
    blocks = cdiv(loops.num_rows, rows)
    if not loops.column_sums:
        return Block(rows, cols, False, blocks == 1), blocks
    col_blocks = cdiv(loops.num_cols, cols)
    programs = min(num_partial_sums(loops.num_rows, col_blocks, _warps(rows, cols), device), blocks)
    each = cdiv(blocks, programs)
    programs = cdiv(blocks, each)
    return Block(rows, cols, True, programs == 1), programs


def config_of(block: Block) -> Config:
    """Returns the configuration of a kernel with this block."""
    sizes = {"ROWS": block.rows, "COLS": block.cols}
    # Products and sums are not contracted, so that a recompute rounds as the forward did.
    return Config(sizes, _warps(block.rows, block.cols), contracts=False)


def _warps(rows: int, cols: int) -> int:
    return min(max(rows * cols // (_WARP * _PER_THREAD), 1), _MAX_WARPS)


def fragment_of(region: Region) -> fx.Graph:
    """Returns a graph that computes a region's outputs from its inputs by launches.

    Raises:
        CannotLaunch: a tensor has a dtype for which Triton has no pointer.
    """
    tensors = [access.tensor for access in region.inputs]
    device = region.outputs[0].tensor.device
    block, programs = block_of(region, device)
    source = source_of(region, block)
    outputs = (access.tensor for access in region.outputs)
    layouts = tuple((t.shape, t.stride(), t.dtype, t.device) for t in (*tensors, *outputs))
    key = source.text, layouts, programs
    if key not in _fragments:
        _fragments[key] = trace_launcher(
            lambda *inputs: _launch(region, block, programs, source, inputs), tensors
        )
    return _fragments[key]


def partial_sum_bytes(region: Region) -> int:
    """Returns the bytes of partial sums that a region's kernel writes, and another reads."""
    if not region.loops.column_sums or not region.outputs:
        return 0
    block, programs = block_of(region, region.outputs[0].tensor.device)
    if block.one_program:
        return 0
    sums = [a for a in region.outputs if root_of(a.value) in region.loops.column_sums]
    return 2 * 4 * programs * sum(a.tensor.numel() for a in sums)


def _launch(
    region: Region, block: Block, programs: int, source: Source, inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    loops, kernel = region.loops, kernel_of(source.name, source.text)
    device = region.outputs[0].tensor.device
    stored, are_partial = [], []
    for access in region.outputs:
        tensor = access.tensor
        are_partial.append(root_of(access.value) in loops.column_sums and not block.one_program)
        if are_partial[-1]:
            stored.append(torch.empty(programs, tensor.numel(), dtype=torch.float32, device=device))
        else:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            stored.append(empty)
    rows = [cdiv(cdiv(loops.num_rows, block.rows), programs) * block.rows] * block.loops
    numbers: list[Any] = [loops.num_cols] if loops.is_flat else [loops.num_rows, *rows]
    grid = (programs * cdiv(loops.num_cols, block.cols),)
    launch(kernel, grid, config_of(block), *inputs, *stored, *numbers)
    results = [access.tensor for access in region.outputs]
    return tuple(
        launch_partial_sums(tensor, result.dtype).view(result.shape) if is_partial else tensor
        for tensor, result, is_partial in zip(stored, results, are_partial, strict=True)
    )
