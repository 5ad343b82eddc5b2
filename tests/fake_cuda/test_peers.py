"""Peer access between many fake devices: who asks for it, its limit, and copies that arrive wrong."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from tests.fake_cuda.race_detector import Line, check, read

Run = Callable[..., list[str]]
CHECKED_BYTES = "65536"


def devices_of(count: int, order: int) -> list[int]:
    return [i * order % count for i in range(count)]


def exchanging(devices: Sequence[int]) -> set[tuple[int, int]]:
    """Returns the pairs of devices whose stages are neighbours, or ends of the skip or of the tie."""
    pairs = {*pairwise(devices), (devices[0], devices[-1]), (devices[1], devices[-1])}
    return pairs | {(other, one) for one, other in pairs}


def peers_in(lines: Sequence[Line]) -> set[tuple[int, int]]:
    return {(int(line.words[0]), int(line.words[1])) for line in lines if line.kind == "peer"}


def without_sizes(lines: Sequence[str]) -> list[str]:
    return [line.partition(";")[0].strip() for line in lines]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("count", "orders"), [(10, (1, 3)), (8, (1, 3)), (16, (1, 5)), (10, (1, 7)), (12, (5, 1))]
)
def test_only_stages_that_exchange_tensors_become_peers(
    count: int, orders: tuple[int, ...], run: Run, tmp_path: Path
) -> None:
    """The first pipeline leaves peers over for the second one, whose neighbours are others."""
    log = tmp_path / "log"
    found = run("peer_cases.py", str(count), "auto", *map(str, orders), devices=count, log=log, limit=600)
    assert found.count("equal") == len(orders)
    assert not [line for line in found if "warning" in line or "pinned" in line], found
    lines = read(log)
    assert peers_in(lines) == set().union(*(exchanging(devices_of(count, order)) for order in orders))
    assert check(lines) == []
    checks = [line for line in lines if line.kind == "copy" and line.words[1::3] == ("d2d", CHECKED_BYTES)]
    assert len(checks) == len(peers_in(lines)), "each direction is checked once"


@pytest.mark.extended
def test_measuring_and_moving_layers_makes_no_peers(run: Run, tmp_path: Path) -> None:
    """A first call measures all layers on one device, which would become the peer of all others."""
    log = tmp_path / "log"
    found = run("peer_cases.py", "10", "auto", "measured", devices=10, log=log, limit=600)
    assert "equal" in found
    assert not [line for line in found if "warning" in line], found
    assert peers_in(read(log)) <= {(i, i + step) for i in range(10) for step in (-1, 1)}


def test_a_pair_beyond_the_limit_of_peers_is_reported(run: Run) -> None:
    found = run("peer_cases.py", "4", "auto", "1", max_peers=1)
    assert "equal" in found
    fault = "CUDA cannot enable it for cuda:{}: peer mapping resources exhausted"
    assert without_sizes(found)[-6:-1] == [
        "stage 0 (cuda:0) -> stage 1 (cuda:1): peer",
        f"stage 1 (cuda:1) -> stage 2 (cuda:2): pinned ({fault.format(1)})",
        "stage 2 (cuda:2) -> stage 3 (cuda:3): peer",
        f"stage 0 (cuda:0) -> stage 3 (cuda:3), skip connection: pinned ({fault.format(0)})",
        f"stage 3 (cuda:3) -> stage 1 (cuda:1), shared parameters: pinned ({fault.format(3)})",
    ]
    warned = [line for line in found if line.startswith("warning")]
    assert [re.findall(r"cuda:\d and cuda:\d", line) for line in warned] == [
        ["cuda:1 and cuda:2"],
        ["cuda:0 and cuda:3"],
        ["cuda:1 and cuda:3"],
    ]
    assert all("eight peers" in line for line in warned)
    (error,) = run("peer_cases.py", "4", "peer", "1", max_peers=1)
    assert "cuda:1 and cuda:2 (stages 1 and 2)" in error
    assert fault.format(1) in error


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(12))
def test_wrong_peer_copies_are_found_before_the_first_step(number: int, run: Run) -> None:
    draw = random.Random(number)
    damage = ("none", "bit", "zeros", "tail")[number % 4]
    wrong = draw.sample([(a, b) for a in range(4) for b in range(4) if a != b], draw.randint(1, 3))
    words = {"wrong_copies": ",".join(f"{a}-{b}" for a, b in wrong), "damage": damage}
    found = run("peer_cases.py", "4", "auto", "1", "3", **words)
    assert found.count("equal") == 2, found
    orders = [devices_of(4, order) for order in (1, 3)]
    pairs = {tuple(sorted(pair)) for devices in orders for pair in exchanging(devices)}
    expected = sorted({tuple(sorted(pair)) for pair in wrong} & pairs)
    for line in found:
        if ends := re.findall(r"\(cuda:(\d)\)", line):
            assert (": pinned (bytes copied" in line) == (tuple(sorted(map(int, ends))) in expected), line
            assert ": peer" in line or ": pinned" in line
    warned = [line for line in found if line.startswith("warning")]
    named = sorted(
        (int(a), int(b)) for line in warned for a, b in re.findall(r"cuda:(\d) and cuda:(\d)", line)
    )
    assert named == expected, "one warning for each pair"
    assert all("IOMMU" in line and "bridge" in line for line in warned)
    if expected:
        assert "arrive changed" in run("peer_cases.py", "4", "peer", "1", "3", **words)[0]
