"""Memory planning: offsets in one block of memory for values with known live ranges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


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


class Chain(NamedTuple):
    """Values that reuse one another's memory in place, one after another.

    Attributes:
        values: the values, in order of their live ranges.
        size: in bytes, of each.
        begin: the step that first writes the first value.
        end: the last step that reads the last value.
    """

    values: tuple[int, ...]
    size: int
    begin: int
    end: int


def place(chains: Iterable[Chain], alignment: int) -> tuple[dict[int, int], int]:
    """Assigns offsets to chains; returns the offset of each value, and the total number of bytes.

    All values of a chain have one offset. Each chain takes the lowest free offset, in order of decreasing
    size (first fit decreasing).
    """
    placed: list[tuple[int, int, int, int]] = []  # begin, end, low, high
    offsets: dict[int, int] = {}
    total = 0
    sized = [(-(-max(chain.size, 1) // alignment) * alignment, chain) for chain in chains]
    for size, (values, _, begin, end) in sorted(sized, key=lambda each: (-each[0], each[1].begin)):
        taken = sorted((low, high) for b, e, low, high in placed if b <= end and begin <= e)
        offset = 0
        for low, high in taken:
            if offset + size <= low:
                break
            offset = max(offset, high)
        placed.append((begin, end, offset, offset + size))
        total = max(total, offset + size)
        offsets.update(dict.fromkeys(values, offset))
    return offsets, total


def reuse_chains(live_ranges: Mapping[int, LiveRange]) -> list[Chain]:
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
    chains = {id(chain): chain for chain in chain_of.values()}.values()
    return [
        Chain(tuple(c), live_ranges[c[0]].size, live_ranges[c[0]].begin, live_ranges[c[-1]].end)
        for c in chains
    ]
