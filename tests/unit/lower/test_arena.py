"""The arena's layout: random lifetimes never collide, and little memory is wasted."""

from __future__ import annotations

import itertools
import random

import pytest

from gpipe_fast.lower.arena import ALIGNMENT, ALIGNMENTS, Lifetime, lay_out

SEEDS = range(40)


def rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def random_lifetimes(seed: int, reuse: bool) -> dict[int, Lifetime]:
    generator = random.Random(seed)
    sizes = [1, 64, 65, 200, 4096, generator.randrange(1, 5000)]
    lifetimes: dict[int, Lifetime] = {}
    for value in range(generator.randrange(2, 60)):
        begin = generator.randrange(40)
        dying = tuple(v for v, life in lifetimes.items() if life.end == begin) if reuse else ()
        end = begin + generator.randrange(12)
        lifetimes[value] = Lifetime(generator.choice(sizes), begin, end, dying)
    return lifetimes


def meet(a: Lifetime, b: Lifetime) -> bool:
    return a.begin <= b.end and b.begin <= a.end


def overlap(a: int, b: int, lifetimes: dict[int, Lifetime], offsets: dict[int, int]) -> bool:
    return offsets[a] < offsets[b] + lifetimes[b].size and offsets[b] < offsets[a] + lifetimes[a].size


def in_place(dying: int, value: int, lifetimes: dict[int, Lifetime], offsets: dict[int, int]) -> bool:
    """Whether ``value`` takes over ``dying``'s memory as it is allowed to."""
    before, life = lifetimes[dying], lifetimes[value]
    return (
        dying in life.reuses
        and before.end == life.begin
        and before.size == life.size
        and offsets[dying] == offsets[value]
    )


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_values_alive_together_do_not_overlap(seed: int, reuse: bool) -> None:
    lifetimes = random_lifetimes(seed, reuse)
    offsets, total = lay_out(lifetimes)
    assert offsets.keys() == lifetimes.keys()
    for value, life in lifetimes.items():
        assert offsets[value] % ALIGNMENT == 0
        assert 0 <= offsets[value] <= total - life.size
    for a, b in itertools.combinations(lifetimes, 2):
        if meet(lifetimes[a], lifetimes[b]) and overlap(a, b, lifetimes, offsets):
            assert in_place(a, b, lifetimes, offsets) or in_place(b, a, lifetimes, offsets)


def peak(lifetimes: dict[int, Lifetime]) -> int:
    last = max(life.end for life in lifetimes.values())
    return max(
        sum(rounded(life.size) for life in lifetimes.values() if life.begin <= step <= life.end)
        for step in range(last + 1)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_total_is_near_the_peak_for_layers(seed: int) -> None:
    """Activations wait for their layer's backward; short-lived values lie between."""
    generator = random.Random(seed)
    num_layers = generator.randrange(3, 20)
    widths = [generator.choice([256, 1024, 4096]) for _ in range(num_layers)]
    lifetimes: dict[int, Lifetime] = {}
    for layer, width in enumerate(widths):
        forward, backward = 2 * layer, 4 * num_layers - 2 * layer
        lifetimes[4 * layer] = Lifetime(width, forward, backward)
        lifetimes[4 * layer + 1] = Lifetime(4 * width, forward, forward + 1)
        lifetimes[4 * layer + 2] = Lifetime(width, backward, backward + 2)
        lifetimes[4 * layer + 3] = Lifetime(4 * width, backward, backward + 1)
    _, total = lay_out(lifetimes)
    assert peak(lifetimes) <= total <= 1.3 * peak(lifetimes)


def test_a_chain_written_in_place_takes_one_place() -> None:
    chain = {v: Lifetime(100, v, v + 1, (v - 1,) if v else ()) for v in range(5)}
    offsets, total = lay_out(chain)
    assert set(offsets.values()) == {0}
    assert total == rounded(100)


def test_a_dying_value_is_taken_over_once() -> None:
    lifetimes = {0: Lifetime(64, 0, 1), 1: Lifetime(64, 1, 2, (0,)), 2: Lifetime(64, 1, 2, (0,))}
    offsets, total = lay_out(lifetimes)
    assert offsets[1] != offsets[2]
    assert total == 128


@pytest.mark.parametrize(
    ("size", "end", "why"), [(64, 2, "is read later"), (32, 1, "is smaller"), (128, 1, "is larger")]
)
def test_a_value_that_does_not_fit_is_not_taken_over(size: int, end: int, why: str) -> None:
    offsets, _ = lay_out({0: Lifetime(size, 0, end), 1: Lifetime(64, 1, 3, (0,))})
    assert offsets[0] != offsets[1], why


def test_a_place_is_used_again_after_death() -> None:
    offsets, total = lay_out({0: Lifetime(640, 0, 1), 1: Lifetime(640, 2, 3)})
    assert offsets == {0: 0, 1: 0}
    assert total == 640


def test_nothing_and_empty_values() -> None:
    assert lay_out({}) == ({}, 0)
    offsets, total = lay_out({0: Lifetime(0, 0, 1), 1: Lifetime(0, 0, 1), 2: Lifetime(64, 0, 1)})
    assert all(offset % ALIGNMENT == 0 and offset <= total for offset in offsets.values())
    assert total <= 3 * ALIGNMENT


def test_offsets_on_gpus_are_aligned_as_the_allocators_blocks() -> None:
    alignment = ALIGNMENTS["cuda"]
    offsets, total = lay_out({i: Lifetime(100 + i, 0, 1) for i in range(4)}, alignment)
    assert sorted(offsets.values()) == [0, alignment, 2 * alignment, 3 * alignment]
    assert total == 4 * alignment
