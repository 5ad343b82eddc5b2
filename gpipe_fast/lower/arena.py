"""Memory planning: offsets in one block of memory for values with known live ranges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpipe_fast import _extension


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

    All values of a chain have one offset. C++ places the chains (csrc/program/place.h).
    """
    chains = list(chains)
    starts, total = _extension.place([chain[1:] for chain in chains], alignment)
    return {v: start for chain, start in zip(chains, starts, strict=True) for v in chain.values}, total


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
