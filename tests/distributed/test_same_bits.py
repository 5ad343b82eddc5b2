"""A pipeline over several processes equals the plain loop and the pipeline in one process, bit for bit."""

from __future__ import annotations

import pytest

from tests.distributed import cases
from tests.distributed.launch import needs_gloo, run_ranks

pytestmark = needs_gloo


@pytest.mark.parametrize(
    ("num_ranks", "chunks", "checkpoints"),
    [
        (2, [5], ["except_last"]),
        pytest.param(2, [1, 2, 5], ["always", "never"], marks=pytest.mark.extended),
        pytest.param(3, [2, 5], ["always"], marks=pytest.mark.extended),
    ],
)
def test_uneven_micro_batches_and_checkpoints(
    num_ranks: int, chunks: list[int], checkpoints: list[str]
) -> None:
    """Eleven samples in 2 and 5 micro-batches: the last is smaller."""
    found = run_ranks(num_ranks, cases.same_bits, ["batch norm"], ["gpipe"], chunks, checkpoints)
    assert found == [len(chunks) * len(checkpoints)] * num_ranks


@pytest.mark.parametrize(
    ("num_ranks", "schedules"),
    [
        (3, ["zb-h1"]),
        *(pytest.param(n, ["gpipe", "1f1b", "zb-h1"], marks=pytest.mark.extended) for n in (2, 3, 4)),
    ],
)
def test_schedules(num_ranks: int, schedules: list[str]) -> None:
    found = run_ranks(num_ranks, cases.same_bits, ["gpt"], schedules, [4], ["except_last"])
    assert found == [len(schedules)] * num_ranks


@pytest.mark.parametrize(
    ("num_ranks", "schedule"),
    [
        (3, "1f1b"),
        *(
            pytest.param(n, s, marks=pytest.mark.extended)
            for n, s in ((2, "gpipe"), (2, "1f1b"), (3, "gpipe"))
        ),
    ],
)
def test_kinds_of_boundaries(num_ranks: int, schedule: str) -> None:
    """Tuples, skip connections of neighbours and beyond, and random layers."""
    names = ["tuples", "skips", "dropout"]
    found = run_ranks(num_ranks, cases.same_bits, names, [schedule], [5], ["except_last"])
    assert found == [3] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.extended)])
def test_tied_parameters(num_ranks: int) -> None:
    """Every process that has a copy of a parameter gets the sum of the gradients of all stages."""
    found = run_ranks(num_ranks, cases.same_bits, ["ties"], ["gpipe", "1f1b"], [3], ["except_last"])
    assert found == [2] * num_ranks


@pytest.mark.parametrize(
    ("names", "schedules"),
    [
        (["skips", "ties"], ["interleaved"]),
        pytest.param(
            ["batch norm", "tuples", "skips", "ties", "dropout"],
            ["interleaved", "1f1b", "gpipe"],
            marks=pytest.mark.extended,
        ),
    ],
)
def test_several_stages_on_each_rank(names: list[str], schedules: list[str]) -> None:
    """Four stages take turns on two ranks; skip connections and ties lie within a rank and between both."""
    found = run_ranks(2, cases.same_bits, names, schedules, [4], ["except_last"], 4)
    assert found == [len(names) * len(schedules)] * 2


def test_delays_change_no_bit() -> None:
    assert run_ranks(3, cases.with_delays, 20) == [20] * 3
