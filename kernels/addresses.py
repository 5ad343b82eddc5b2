"""Address tables, which let one launch process many tensors.

A table is an int64 tensor with one column per program; each program reads its 24-byte column::

    tensors of 5000 and 100 elements, blocks of 4096    address of A   A0     A0 + 4096 i_A   A1
    in accumulators A and gradients G of itemsizes      address of G   G0     G0 + 4096 i_G   G1
    i_A and i_G                                         elements       4096   904             100

Recent tables are cached. The cache key has everything that a table is built from (addresses, sizes, stream),
so a cached table is never stale: every call reads the addresses again, and a tensor that was moved or
replaced yields a different key.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

# A pair of tensors: the address of the accumulator, the address of the gradient, and the number of elements.
TensorPair = tuple[int, int, int]
# Cached tables, one per set of tensors.
MAX_CACHED_TABLES = 64


@functools.lru_cache(MAX_CACHED_TABLES)
def _build_table(
    device: torch.device, stream: int, block: int, sizes: tuple[int, int], spans: tuple[TensorPair, ...]
) -> Tensor:
    """Returns the table of a set of tensors, on their device. Copied and read in the order of one stream.

    Args:
        device: the device of the tensors.
        stream: the stream on which the table is used.
        block: the number of elements that one program processes.
        sizes: the itemsizes of accumulators and gradients.
        spans: the spans of the tensors, none of them empty.
    """
    a, g, numel = torch.tensor(spans).unbind(1)
    programs = (numel + block - 1) // block
    which = torch.repeat_interleave(programs)
    first = (torch.arange(len(which)) - (programs.cumsum(0) - programs)[which]) * block
    count = (numel[which] - first).clamp(max=block)
    table = torch.stack([a[which] + first * sizes[0], g[which] + first * sizes[1], count])
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def _non_overlapping_and_dense(x: Tensor) -> bool:
    """Returns whether a tensor is contiguous in some order of its dimensions (non-overlapping and dense)."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((t, s) for t, s in zip(x.stride(), x.shape, strict=True) if s != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def group_spans(
    accumulators: Sequence[Tensor], gradients: Sequence[Tensor], dtypes: Collection[torch.dtype]
) -> tuple[dict[tuple[torch.dtype, torch.dtype], list[TensorPair]], list[int]]:
    """Returns the spans by dtype pair, and the indices of the pairs that no kernel supports.

    Unsupported are pairs with different layouts or gaps, pairs with other dtypes, and repeated accumulators.

    Args:
        accumulators: tensors that a kernel writes to.
        gradients: tensors of the same number and shapes; pass the accumulators if there is only one list.
        dtypes: dtypes that the kernel supports.
    """
    spans: dict[tuple[torch.dtype, torch.dtype], list[TensorPair]] = {}
    others, seen = [], set()
    for index, (a, g) in enumerate(zip(accumulators, gradients, strict=True)):
        if not a.numel():
            continue
        same_layout = (a.is_contiguous() and g.is_contiguous()) or (
            a.stride() == g.stride() and _non_overlapping_and_dense(a)
        )
        address = a.data_ptr()
        if same_layout and address not in seen and a.dtype in dtypes and g.dtype in dtypes:
            spans.setdefault((a.dtype, g.dtype), []).append((address, g.data_ptr(), a.numel()))
        else:
            others.append(index)
        seen.add(address)
    return spans, others


def address_table(
    device: torch.device, block: int, sizes: tuple[int, int], spans: tuple[TensorPair, ...]
) -> Tensor:
    """Returns the table for programs of ``block`` elements each, on the current stream; cached.

    Raises:
        RuntimeError: a CUDA graph is being captured. The graph would read a table that the cache may free.
    """
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"multi-tensor ops on {device} were called in the capture of a CUDA graph, but the graph "
                "would read an address table that may be freed; call them outside of the capture"
            )
        stream = torch.cuda.current_stream(device).cuda_stream
    return _build_table(device, stream, block, sizes, spans)
