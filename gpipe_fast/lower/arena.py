"""Memory planning: offsets in one block of memory for values with known live ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# The alignment of PyTorch's allocations, in bytes, by device type; types not listed use the CPU's alignment.
# Libraries such as cuBLASLt choose algorithms by alignment, so a different alignment changes bits.
ALIGNMENT = 64
ALIGNMENTS = {"cuda": 512}


@dataclass(frozen=True)
class LiveRange:
    """The live range of a value.

    Attributes:
        size: in bytes.
        begin: the step that first writes the value.
        end: the last step that reads the value; at least ``begin``.
        reuses: values whose live ranges end at ``begin`` and whose memory the value may reuse in place.
    """

    size: int
    begin: int
    end: int
    reuses: tuple[int, ...] = ()


def assign_offsets(
    live_ranges: Mapping[int, LiveRange], alignment: int = ALIGNMENT
) -> tuple[dict[int, int], int]:
    """Assigns offsets such that no two values that are live at the same step overlap.

    A value that reuses memory in place takes the offset of the value before it. All others take the lowest
    free offset, in order of decreasing size (first fit decreasing).

    Args:
        live_ranges: live ranges by value.
        alignment: alignment of offsets, in bytes.

    Returns:
        Each value's offset in bytes, a multiple of ``alignment``, and the total number of bytes.
    """
    chains = _reuse_chains(live_ranges)
    placed: list[tuple[int, int, int, int]] = []  # begin, end, low, high
    offsets: dict[int, int] = {}
    total = 0

    def size_of(chain: Sequence[int]) -> int:
        return -(-max(live_ranges[chain[0]].size, 1) // alignment) * alignment

    for chain in sorted(chains, key=lambda c: (-size_of(c), live_ranges[c[0]].begin)):
        size = size_of(chain)
        begin, end = live_ranges[chain[0]].begin, live_ranges[chain[-1]].end
        taken = sorted((low, high) for b, e, low, high in placed if b <= end and begin <= e)
        offset = 0
        for low, high in taken:
            if offset + size <= low:
                break
            offset = max(offset, high)
        placed.append((begin, end, offset, offset + size))
        total = max(total, offset + size)
        offsets.update(dict.fromkeys(chain, offset))
    return offsets, total


def _reuse_chains(live_ranges: Mapping[int, LiveRange]) -> list[Sequence[int]]:
    """Groups values that reuse one another's memory in place, in order of their live ranges."""
    chain_of: dict[int, list[int]] = {}
    for value in sorted(live_ranges, key=lambda v: live_ranges[v].begin):
        live_range = live_ranges[value]
        for dying in live_range.reuses:
            chain = chain_of.get(dying)
            before = live_ranges.get(dying)
            if (
                chain
                and before
                and chain[-1] == dying
                and before.end == live_range.begin
                and before.size == live_range.size
            ):
                chain.append(value)
                chain_of[value] = chain
                break
        else:
            chain_of[value] = [value]
    return list({id(c): c for c in chain_of.values()}.values())
