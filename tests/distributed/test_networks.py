"""A pipeline over a slow network equals the plain loop and the pipeline in one process, bit for bit."""

from __future__ import annotations

import pytest

from bench.compare.network import NoNetworkError, network
from tests.distributed import cases
from tests.distributed.launch import needs_gloo, run_ranks

pytestmark = needs_gloo


@pytest.mark.parametrize(
    ("num_ranks", "names", "schedules"),
    [
        (2, ["tuples"], ["1f1b"]),
        *(
            pytest.param(n, ["gpt", "skips", "ties"], ["gpipe", "1f1b"], marks=pytest.mark.extended)
            for n in (2, 3)
        ),
    ],
)
def test_latency_and_a_limited_rate_change_no_bit(
    num_ranks: int, names: list[str], schedules: list[str]
) -> None:
    """Each process is in a network namespace of its own, and packets take 2 ms longer."""
    try:
        with network(num_ranks, delay=0.002, megabits=50) as hosts:
            found = run_ranks(num_ranks, cases.same_bits, names, schedules, [4], ["always"], hosts=hosts)
    except NoNetworkError as error:
        pytest.skip(str(error))
    assert found == [len(names) * len(schedules)] * num_ranks


def test_the_network_has_the_latency() -> None:
    try:
        with network(2, delay=0.02) as hosts:
            seconds, _ = run_ranks(2, cases.round_trip, hosts=hosts)
    except NoNetworkError as error:
        pytest.skip(str(error))
    assert seconds >= 0.04
