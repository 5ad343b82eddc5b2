"""Replicas of the stages along the dimension 'dp_replicate' of a mesh, in two to four processes."""

from __future__ import annotations

import math
import re

import pytest

from tests.distributed import replica_cases as cases
from tests.distributed.launch import needs_gloo, run_ranks

pytestmark = needs_gloo


@pytest.mark.parametrize(
    ("names", "schedules"),
    [
        (["ties"], ["1f1b"]),
        *(
            pytest.param([name], ["gpipe", "1f1b", "zb-h1"], marks=pytest.mark.extended)
            for name in ("batch norm", "ties", "gpt", "dropout", "skips")
        ),
    ],
    ids=str,
)
def test_gradients_are_summed_in_the_order_of_replicas(names: list[str], schedules: list[str]) -> None:
    """Two replicas with 9 and 6 samples, of two stages each, equal two processes added up, bit for bit."""
    assert run_ranks(4, cases.same_sums, names, schedules) == [len(schedules)] * 4


@pytest.mark.extended
@pytest.mark.parametrize(("num_ranks", "name"), [(3, "gpt"), (6, "ties")])
def test_three_replicas_get_the_same_bits(num_ranks: int, name: str) -> None:
    """All replicas of a stage do, and all stages that share a parameter; the next step gets them, too."""
    found = run_ranks(num_ranks, cases.equal_bits, name)
    for stage in range(num_ranks // 3):
        assert found[stage] == found[stage :: num_ranks // 3][1] == found[stage :: num_ranks // 3][2]
    if name == "ties":
        tied = [
            grads[key] for grads in found for key in ("0.weight", "2.1.weight", "4.weight") if key in grads
        ]
        assert len(tied) == 6
        assert all(each == tied[0] for each in tied)


def test_gradients_of_several_dtypes_layouts_and_buckets() -> None:
    assert run_ranks(4, cases.several_buckets) == [1] * 4


def test_float32_gradients_are_rounded_after_the_sum_over_replicas() -> None:
    assert True in run_ranks(4, cases.rounded_once)


def test_the_loss_is_divided_by_the_count_of_all_replicas() -> None:
    found = run_ranks(4, cases.counted)
    assert [str(losses) for losses in found] == [str(found[0])] * 4
    assert math.isfinite(sum(found[0][:2]))
    assert math.isnan(found[0][2])


def test_parameters_stay_equal_and_running_statistics_do_not() -> None:
    assert run_ranks(4, cases.averaged) == [7, 2, 7, 2]


@pytest.mark.parametrize(("rank", "action"), [(2, "0B0"), pytest.param(3, "1F1", marks=pytest.mark.extended)])
def test_a_failure_in_one_replica_fails_all(rank: int, action: str) -> None:
    """When the first stage of one replica fails in its last action, that of the other waits for the sum."""
    found = run_ranks(4, cases.failing, rank, action)
    text = rf"injected ValueError \(in action {action}: .*\)"
    for number, (in_step, in_backward) in enumerate(found):
        whose = "ValueError: " if number == rank else f"RuntimeError: rank {rank} has failed, .*: "
        assert re.fullmatch(whose + text, in_step)
        assert re.fullmatch(whose + text, in_backward)


def test_replicas_differ() -> None:
    found = run_ranks(4, cases.differing)
    assert any("differ in the method: here " in method for method, *_ in found)
    assert any("differ in layer 4 (Linear): here " in layer for _, layer, _ in found)
    place = "'bias' of layer 1 (BatchNorm1d) differs between rank 0 and rank 2"
    for *_, start in found:
        assert place in start
        assert "load the same weights" in start
    assert all(error for errors in found for error in errors)


@pytest.mark.parametrize("how", ["exit", pytest.param("stop", marks=pytest.mark.extended)])
def test_a_rank_of_a_replica_is_lost(how: str) -> None:
    *others, _ = run_ranks(4, cases.losing_a_rank, how, hangs=[3])
    for error in others:
        assert re.search("another process, failed|has waited for .* ranks|has failed", error)
