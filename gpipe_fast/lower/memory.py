"""Memory of a program's values: offsets in the arena, the block of memory that values share whose live ranges
do not overlap; releases after the last use; and the parts of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from gpipe_fast import _extension
from gpipe_fast.lower.operators import is_pointwise
from gpipe_fast.lower.program import ProgramIR, StorageKind, Value
from gpipe_fast.lower.steps import Call, Release, Step, values_in, values_used, values_written
from gpipe_fast.strides import span
from gpipe_fast.trace.joint_graph import GraphRole


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


def place(chains: Sequence[Chain], alignment: int) -> tuple[dict[int, int], int]:
    """Assigns offsets to chains; returns the offset of each value, and the total number of bytes.

    All values of a chain have one offset. C++ places the chains (csrc/program/place.h).
    """
    starts, total = _extension.place([chain[1:] for chain in chains], alignment)
    return {v: start for chain, start in zip(chains, starts, strict=True) for v in chain.values}, total


def reuse_chains(live_ranges: Mapping[int, LiveRange]) -> list[Chain]:
    """Groups values that reuse one another's memory in place, in order of their live ranges."""
    chains: list[list[int]] = []
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
            chains.append(chain_of[value])
    return [
        Chain(tuple(c), live_ranges[c[0]].size, live_ranges[c[0]].begin, live_ranges[c[-1]].end)
        for c in chains
    ]


@dataclass(frozen=True)
class MemoryPlan:
    """The arena values of a program.

    Attributes:
        chains: the values that need memory of their own, with those that reuse it.
        alignment: of offsets, in bytes.
    """

    chains: Sequence[Chain]
    alignment: int

    def place(self, program: ProgramIR) -> None:
        """Assigns offsets to the program's arena values."""
        offsets, program.arena_bytes = place(self.chains, self.alignment)
        for i, offset in offsets.items():
            program.values[i] = replace(program.values[i], index=offset)


def plan_memory(program: ProgramIR, device: torch.device) -> MemoryPlan:
    """Finds the live ranges of arena values, and releases other values of a run after their last use.

    Those are what the run allocates, and the saved tensors that it is given.
    """
    values, steps = program.values, program.steps
    base_of = [*map(program.base_of, range(len(values)))]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, step in enumerate(steps):
        for used in values_used(step):
            first.setdefault(base_of[used], position)
            last[base_of[used]] = position
    kept = {base_of[r] for r in program.results}

    live_ranges = {
        i: LiveRange(_bytes(v), first[i], last[i], _reusable_arguments(program, steps[first[i]], i, base_of))
        for i, v in enumerate(values)
        if v.storage is StorageKind.ARENA and i in first
    }
    inputs = (i for i, v in enumerate(values) if v.storage is StorageKind.INPUT)
    saved = {i for i, port in zip(inputs, program.inputs, strict=True) if port.role is GraphRole.SAVED}
    ends: dict[int, list[int]] = {}
    for i, v in enumerate(values):
        is_of_run = v.storage in (StorageKind.FRESH, StorageKind.RESULT) or i in saved
        if is_of_run and i in last and i not in kept:
            ends.setdefault(last[i], []).append(i)
    program.steps = [
        s
        for position, step in enumerate(steps)
        for s in (step, *(Release(v) for v in ends.get(position, ())))
    ]
    return MemoryPlan(reuse_chains(live_ranges), _extension.alignment_of(device))


def parts(program: ProgramIR) -> tuple[int, int]:
    """Returns the steps at which a program's second and third parts begin (see ``ProgramIR.parts``)."""
    values, steps = program.values, program.steps
    base_of = [*map(program.base_of, range(len(values)))]
    inputs = (i for i, v in enumerate(values) if v.storage is StorageKind.INPUT)
    tangents = {i for i, port in zip(inputs, program.inputs, strict=True) if port.role is GraphRole.TANGENT}
    results = {base_of[r] for r in program.results}
    early, computed = len(steps), 0
    for position, step in enumerate(steps):
        if early == len(steps) and any(base_of[v] in tangents for v in values_used(step)):
            early = position
        if any(base_of[v] in results for v in values_written(step)):
            computed = position + 1
    return early, max(early, computed)


def _reusable_arguments(program: ProgramIR, step: Step, value: int, base_of: list[int]) -> tuple[int, ...]:
    """Returns the arguments of a pointwise call whose memory the call's result may reuse."""
    if not isinstance(step, Call) or step.results is not None or not is_pointwise(step.op):
        return ()
    if program.values[value].dtype.is_complex:  # a division in place rounds differently
        return ()
    refs = [r for r in values_in(step.arguments) if r != value]
    own = program.values[value]
    found = []
    for ref in refs:
        other = program.values[ref]
        theirs = (other.sizes, other.strides, other.dtype, other.bits)
        same = theirs == (own.sizes, own.strides, own.dtype, own.bits)
        # A kernel could read another view of the same memory after overwriting it.
        if same and other.storage is StorageKind.ARENA and all(r == ref for r in refs if base_of[r] == ref):
            found.append(ref)
    return tuple(found)


def _bytes(value: Value) -> int:
    return span(value.sizes, value.strides) * value.dtype.itemsize
