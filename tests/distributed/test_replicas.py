"""Replicas of the stages along the dimension 'dp_replicate' of a mesh, in two to four processes."""

from __future__ import annotations

import math

import pytest

from tests.distributed import replica_cases as cases
from tests.distributed.launch import needs_gloo, run_ranks

pytestmark = needs_gloo


@pytest.mark.parametrize(
    ("names", "schedules"),
    [
        (["ties"], ["1f1b"]),
        pytest.param(
            ["batch norm", "ties", "dropout", "skips"], ["1f1b", "zb-h1"], marks=pytest.mark.extended
        ),
    ],
    ids=str,
)
def test_gradients_are_summed_in_the_order_of_replicas(names: list[str], schedules: list[str]) -> None:
    """Two replicas with 9 and 6 samples, of two stages each, equal two processes added up, bit for bit."""
    assert run_ranks(4, cases.same_sums, names, schedules) == [len(names) * len(schedules)] * 4


def test_gradients_of_several_dtypes_layouts_and_buckets() -> None:
    assert run_ranks(4, cases.several_buckets) == [1] * 4


def test_float32_gradients_are_rounded_after_the_sum_over_replicas() -> None:
    assert True in run_ranks(4, cases.rounded_once)


def test_the_loss_is_divided_by_the_count_of_all_replicas() -> None:
    found = run_ranks(4, cases.counted)
    assert [str(losses) for losses in found] == [str(found[0])] * 4
    assert math.isfinite(sum(found[0][:2]))
    assert math.isnan(found[0][2])


@pytest.mark.parametrize("num_replicas", [2, pytest.param(3, marks=pytest.mark.extended)])
def test_parameters_stay_equal_and_running_statistics_do_not(num_replicas: int) -> None:
    assert run_ranks(2 * num_replicas, cases.averaged) == [7, 2] * num_replicas


def test_replicas_differ() -> None:
    found = run_ranks(4, cases.differing)
    assert any("differ in the method: here " in method for method, _ in found)
    for method, start in found:
        assert method
        assert "'bias' of layer 1 (BatchNorm1d) differs between rank 0 and rank 2" in start
        assert "load the same weights" in start
