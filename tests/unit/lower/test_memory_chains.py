"""The arena's layout: overlapping live ranges never share memory, and little memory is wasted."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from gpipe_fast._extension import alignment_of
from gpipe_fast.lower.memory import LiveRange, place, reuse_chains

SEEDS = range(40)
ALIGNMENT = alignment_of(torch.device("cpu"))


def assign_offsets(ranges: dict[int, LiveRange], alignment: int = ALIGNMENT) -> tuple[dict[int, int], int]:
    return place(reuse_chains(ranges), alignment)


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def random_live_ranges(seed: int, reuse: bool) -> dict[int, LiveRange]:
    generator = random.Random(seed)
    sizes = [1, 64, 65, 200, 4096, generator.randrange(1, 5000)]
    live_ranges: dict[int, LiveRange] = {}
    for value in range(generator.randrange(2, 60)):
        begin = generator.randrange(40)
        dying = tuple(v for v, live_range in live_ranges.items() if live_range.end == begin) if reuse else ()
        end = begin + generator.randrange(12)
        live_ranges[value] = LiveRange(generator.choice(sizes), begin, end, dying)
    return live_ranges


def overlap_in_time(a: LiveRange, b: LiveRange) -> bool:
    return a.begin <= b.end and b.begin <= a.end


def overlap_in_memory(a: int, b: int, live_ranges: dict[int, LiveRange], offsets: dict[int, int]) -> bool:
    return offsets[a] < offsets[b] + live_ranges[b].size and offsets[b] < offsets[a] + live_ranges[a].size


def reuses_memory(dying: int, value: int, live_ranges: dict[int, LiveRange], offsets: dict[int, int]) -> bool:
    """Returns whether ``value`` may reuse, and does reuse, the memory of ``dying``."""
    before, live_range = live_ranges[dying], live_ranges[value]
    return (
        dying in live_range.reuses
        and before.end == live_range.begin
        and before.size == live_range.size
        and offsets[dying] == offsets[value]
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_values_that_are_live_together_do_not_overlap(seed: int) -> None:
    reuse = seed % 4 > 0
    live_ranges = random_live_ranges(seed, reuse)
    offsets, total = assign_offsets(live_ranges)
    assert offsets.keys() == live_ranges.keys()
    for value, live_range in live_ranges.items():
        assert offsets[value] % ALIGNMENT == 0
        assert 0 <= offsets[value] <= total - live_range.size
    for a, b in itertools.combinations(live_ranges, 2):
        if overlap_in_time(live_ranges[a], live_ranges[b]) and overlap_in_memory(a, b, live_ranges, offsets):
            assert reuses_memory(a, b, live_ranges, offsets) or reuses_memory(b, a, live_ranges, offsets)


def peak(live_ranges: dict[int, LiveRange]) -> int:
    last = max(live_range.end for live_range in live_ranges.values())
    return max(
        sum(
            aligned(live_range.size)
            for live_range in live_ranges.values()
            if live_range.begin <= step <= live_range.end
        )
        for step in range(last + 1)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_the_arena_of_a_training_step_is_close_to_its_peak(seed: int) -> None:
    """Activations live until their layer's backward; all other values are short-lived."""
    generator = random.Random(seed)
    num_layers = generator.randrange(3, 20)
    widths = [generator.choice([256, 1024, 4096]) for _ in range(num_layers)]
    live_ranges: dict[int, LiveRange] = {}
    for layer, width in enumerate(widths):
        forward, backward = 2 * layer, 4 * num_layers - 2 * layer
        live_ranges[4 * layer] = LiveRange(width, forward, backward)
        live_ranges[4 * layer + 1] = LiveRange(4 * width, forward, forward + 1)
        live_ranges[4 * layer + 2] = LiveRange(width, backward, backward + 2)
        live_ranges[4 * layer + 3] = LiveRange(4 * width, backward, backward + 1)
    _, total = assign_offsets(live_ranges)
    assert peak(live_ranges) <= total <= 1.3 * peak(live_ranges)


def test_a_chain_of_in_place_values_takes_one_block() -> None:
    chain = {v: LiveRange(100, v, v + 1, (v - 1,) if v else ()) for v in range(5)}
    offsets, total = assign_offsets(chain)
    assert set(offsets.values()) == {0}
    assert total == aligned(100)


def test_gpu_offsets_are_aligned_like_the_allocators_blocks() -> None:
    alignment = alignment_of(torch.device("cuda"))
    offsets, total = assign_offsets({i: LiveRange(100 + i, 0, 1) for i in range(4)}, alignment)
    assert sorted(offsets.values()) == [0, alignment, 2 * alignment, 3 * alignment]
    assert total == 4 * alignment
