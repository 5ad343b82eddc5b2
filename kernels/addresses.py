"""Tables of addresses, through which one launch reaches many tensors.

A table is of int64 and has a column for each program, which reads 24 bytes of it::

    tensors of 5000 and 100 elements, blocks of 4096    address of A   A0     A0 + 4096 i_A   A1
    in accumulators A and gradients G of itemsizes      address of G   G0     G0 + 4096 i_G   G1
    i_A and i_G                                         elements       4096   904             100

The tables made last are kept, by all that they are made from: addresses, sizes and stream. So none is ever
stale: addresses are read anew at each call, and a tensor that was moved or replaced has another key.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

# Of two tensors that one program takes together: addresses of accumulator and gradient, number of elements.
Span = tuple[int, int, int]
# Tables that are kept: one for each set of tensors.
KEPT = 64


@functools.lru_cache(KEPT)
def _table(
    device: torch.device, stream: int, block: int, sizes: tuple[int, int], spans: tuple[Span, ...]
) -> Tensor:
    """The table of a set of tensors, where they are; for one stream, in whose order it is copied and read.

    Args:
        device: of the tensors.
        stream: that it is used on.
        block: elements that one program takes.
        sizes: itemsizes of accumulators and gradients.
        spans: of the tensors, none of them empty.
    """
    a, g, numel = torch.tensor(spans).unbind(1)
    programs = (numel + block - 1) // block
    which = torch.repeat_interleave(programs)
    first = (torch.arange(len(which)) - (programs.cumsum(0) - programs)[which]) * block
    count = (numel[which] - first).clamp(max=block)
    table = torch.stack([a[which] + first * sizes[0], g[which] + first * sizes[1], count])
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def _dense(x: Tensor) -> bool:
    """Whether its elements lie in memory one after the other, in any order of dimensions."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((t, s) for t, s in zip(x.stride(), x.shape, strict=True) if s != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def reach(
    accumulators: Sequence[Tensor], gradients: Sequence[Tensor], dtypes: Collection[torch.dtype]
) -> tuple[dict[tuple[torch.dtype, torch.dtype], list[Span]], list[int]]:
    """Spans by the dtypes of both, and the indices of pairs that no kernel takes.

    These are pairs of different layouts or with gaps, of other dtypes, and accumulators that came before.

    Args:
        accumulators: tensors that a kernel writes to.
        gradients: of the same number and shapes; the same ones, if there is nothing else to reach.
        dtypes: that the kernel takes.
    """
    spans: dict[tuple[torch.dtype, torch.dtype], list[Span]] = {}
    others, seen = [], set()
    for index, (a, g) in enumerate(zip(accumulators, gradients, strict=True)):
        if not a.numel():
            continue
        alike = (a.is_contiguous() and g.is_contiguous()) or (a.stride() == g.stride() and _dense(a))
        address = a.data_ptr()
        if alike and address not in seen and a.dtype in dtypes and g.dtype in dtypes:
            spans.setdefault((a.dtype, g.dtype), []).append((address, g.data_ptr(), a.numel()))
        else:
            others.append(index)
        seen.add(address)
    return spans, others


def table_of(device: torch.device, block: int, sizes: tuple[int, int], spans: tuple[Span, ...]) -> Tensor:
    """The table for programs of ``block`` elements each, on the current stream; made if it is not kept.

    Raises:
        RuntimeError: a CUDA graph is being captured: it would read a table that is not kept for it.
    """
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("multi-tensor ops cannot be captured: their tables are made from addresses")
        stream = torch.cuda.current_stream(device).cuda_stream
    return _table(device, stream, block, sizes, spans)
